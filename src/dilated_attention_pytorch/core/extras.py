"""How to install an extra. The package is on no index: a distribution of its name on PyPI is another project's."""


def install_extra(extra: str) -> str:
    """The command that installs an extra, for errors.

    >>> install_extra("viz")
    "pip install '.[viz]' in a checkout of the repository"
    """
    return f"pip install '.[{extra}]' in a checkout of the repository"
