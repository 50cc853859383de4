"""What mkdocs.yml adds to the pages of this folder: pages made from other files, and a reference of public names."""

from __future__ import annotations

import ast
import posixpath
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from griffe import Extension
except ImportError:  # which only building the site needs
    Extension = object

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = "dilated_attention_pytorch"
COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "ROADMAP.md": "roadmap.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/[0-9]*.py"))},
}
# The pages of the reference: title, and the rooms whose public names they show. A name is shown once.
REFERENCE = {
    "attention": ("Attention", ["functional", "nn"]),
    "patterns": ("Patterns, caches, pools", ["core"]),
    "parallel": ("Across ranks", ["parallel"]),
    "models": ("Models", ["models"]),
    "huggingface": ("Hugging Face", ["models.hf"]),
    "training": ("Training", ["train"]),
    "slides": ("Slides", ["slides"]),
    "tools": ("Tools", ["tools"]),
}
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: the reference, and pages of this folder that it does not list yet, among the how-tos."""
    sections = {title: entry for section in config.nav for title, entry in section.items()}
    sections["Reference"] += [{title: f"reference/{page}.md"} for page, (title, _) in REFERENCE.items()]
    *_, examples = sections["Tutorials"]
    examples["Examples"] += [page for source, page in COPIED.items() if source.endswith(".py")]
    listed = str(config.nav)
    sections["How-to"] += [path.name for path in sorted(ROOT.glob("docs/*.md")) if f"'{path.name}'" not in listed]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    from mkdocs.structure.files import File

    pages = {page: _copied(source, page) for source, page in COPIED.items()} | _reference()
    for path, text in (pages | {"explorer.html": _explorer()}).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    source = page.file.src_uri
    return markdown if page.file.generated_by else _relinked(markdown, f"docs/{source}", source)


def on_page_content(html: str, **_: object) -> str:
    """Flags of commands within code, which a browser would break after their dashes."""
    return re.sub(r"(?<![\w-])--[a-z][\w-]*(?=[^<>]*</code>)", r'<span class="flag">\g<0></span>', html)


def _copied(source: str, page: str) -> str:
    text = (ROOT / source).read_text()
    return _relinked(_notebook(text) if source.endswith(".py") else text, source, page)


def _relinked(text: str, source: str, page: str) -> str:
    """The links of a file of the repository as they are on its page; words, where the site lacks what they lead to."""

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = COPIED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None:
            return match[1] if (ROOT / path).exists() else match[0]  # which the build then reports
        return f"[{match[1]}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{match[3] or ''})"

    return LINK.sub(link, text)


def _notebook(script: str) -> str:
    """A script in jupytext's percent format as text and blocks of code."""
    cells = re.split(r"(?m)^# %%(.*)\n", script)[1:]
    return "\n".join(
        re.sub("(?m)^# ?", "", text) if "markdown" in kind else f"```python\n{text.strip()}\n```\n"
        for kind, text in zip(cells[::2], cells[1::2])
    )


def _explorer() -> str:
    from dilated_attention_pytorch.pages.explorer import write_explorer

    with tempfile.TemporaryDirectory() as folder:
        write_explorer(Path(folder) / "explorer.html")
        page = (Path(folder) / "explorer.html").read_text(encoding="utf-8")
    return page.replace("<body>", '<body>\n<nav><a href="index.html">← dilated-attention-pytorch</a></nav>')


def _reference() -> dict[str, str]:
    """One page per group of rooms; mkdocstrings replaces `::: name` by the docstring of the name."""
    pages, root = {}, _exported("")
    paths = {name: f"{PACKAGE}.{name}" for name in root}
    shown = set()
    for page, (title, rooms) in REFERENCE.items():
        lines = [f"# {title}\n"]
        names = {name: room for room in rooms for name in _exported(room)}
        # Those of the root that are in no room: they belong to training, which it imports when they are asked for.
        own = [name for name in _in_no_room(root) if (page == "tools") == name.startswith("__")]
        if page in ("training", "tools"):
            names |= dict.fromkeys(own, "")
        for name, room in sorted(names.items(), key=lambda item: item[0] not in root):  # the root's names first
            path = paths.get(name, f"{PACKAGE}.{room}.{name}")
            if path not in shown:
                links = [f"[{title}](../{page})" for page, title in _pages_that_use(name)]
                entry = f"::: {path}\n"
                if (ROOT / "src" / PACKAGE / room.replace(".", "/") / f"{name}.py").is_file():
                    # Of a function and its module of the same name, the module would be shown.
                    entry = f"::: {PACKAGE}.{room}.{name}.{name}\n    options: {{heading: {path}}}\n"
                lines += [entry, f"*In use:* {', '.join(links)}\n" if links else ""]
            shown.add(path)
        pages[f"reference/{page}.md"] = "\n".join(lines)
    return pages


def _pages_that_use(name: str) -> list[tuple[str, str]]:
    """Files and titles of the pages of this folder whose Python has the name."""
    texts = {path.name: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
    return [
        (page, text.splitlines()[0].removeprefix("# "))
        for page, text in texts.items()
        if any(re.search(rf"\b{name}\b", block) for block in re.findall(r"(?ms)^```python\n(.*?)^```$", text))
    ]


def _in_no_room(names: list[str]) -> list[str]:
    found = {name for _, rooms in REFERENCE.values() for room in rooms for name in _exported(room)}
    return [name for name in names if name not in found]


def _exported(room: str) -> list[str]:
    """The `__all__` of a room, read without importing it."""
    path = ROOT / "src" / PACKAGE / room.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{path} has no __all__")


class FencedExamples(Extension):
    """Doctests as blocks of code: to Markdown, `>>>` is a quotation."""

    def on_object(self, *, obj, **_) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


class PlainDefaults(Extension):
    """A setting's default in signatures, without its help text: `= 768`, not `= setting(768, "width of the model")`."""

    def on_attribute_instance(self, *, attr, **_) -> None:
        if str(getattr(attr.value, "function", "")) == "setting":
            default = attr.value.arguments[0]
            constant = attr.module.members.get(str(default))
            attr.value = default if constant is None or constant.is_alias else constant.value


def fenced(text: str) -> str:
    """Put each run of lines that begins with `>>>` and ends at an empty line between fences."""
    return re.sub(r"(?m)^( *)>>> (?:.+\n?)+", lambda run: f"{run[1]}```pycon\n{run[0].rstrip()}\n{run[1]}```\n", text)
