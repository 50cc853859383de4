"""The wheel and the sdist: what they contain, what they say, and whether an empty environment can use them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

import dilated_attention_pytorch as package

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta as b; _, to = sys.argv; b.build_sdist(to); b.build_wheel(to)"

USE = """
import torch, dilated_attention_pytorch as package
q = torch.randn(1, 100, 4, 8)
print(package.__file__)
print(package.dilated_attention(q, q, q, [16, 128], [1, 4]).shape)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_wheel_and_sdist_hold_the_package_and_valid_metadata(built) -> None:
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (metadata,) = [name for name in files if name.endswith(".dist-info/METADATA")]
        described = Metadata.from_email(archive.read(metadata), validate=True)
    source = ROOT / "src"
    found = [path for path in (source / package.__name__).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {path.relative_to(source).as_posix() for path in found}
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert (described.name, str(described.version)) == ("longnet-dilated-attention", package.__version__)
    assert described.description_content_type == "text/markdown"
    assert {one.name for one in described.requires_dist if one.marker is None} == {"numpy", "safetensors", "torch"}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in expected} | {"pyproject.toml", "README.md", "LICENSE"} <= held
    assert "tests" not in held  # some of them, which setuptools would add, could not run alone


def test_an_empty_environment_can_use_the_wheel(built, tmp_path) -> None:
    wheel, _ = built
    venv.create(tmp_path / "env", symlinks=os.name != "nt")
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    (python,) = [path for path in scripts.iterdir() if path.name in ("python", "python.exe")]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run([*command], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    # Its requirements come from the environment of the tests, after its own packages.
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "requirements.pth").write_text("\n".join(others) + "\n")
    where, shape = run(python, "-c", USE).splitlines()
    assert Path(where).is_relative_to(site)
    assert shape == "torch.Size([1, 100, 4, 8])"
    command = shutil.which("dilated-attention", path=str(scripts))
    assert run(command, "--version") == f"dilated-attention {package.__version__}"
    assert run(command, "help").startswith("usage: dilated-attention")


def test_importing_warns_of_the_other_project_with_this_name(monkeypatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package._warn_of_namesake()
        monkeypatch.setattr(metadata, "files", lambda name: [metadata.PackagePath("__editable__.pth")])
        package._warn_of_namesake()
    monkeypatch.setattr(metadata, "files", lambda name: [metadata.PackagePath("dilated_attention_pytorch/__init__.py")])
    with pytest.warns(UserWarning, match="pip uninstall dilated-attention-pytorch"):
        package._warn_of_namesake()


def test_workflows_run_commands_and_tests_that_exist() -> None:
    listed = (ROOT / "run").read_text()
    texts = {path.name: path.read_text() for path in (ROOT / ".github").rglob("*.yml")}
    assert {"test.yml", "release.yml", "bug.yml", "feature.yml"} <= texts.keys()
    for text in texts.values():
        assert yaml.safe_load(text)
        for command in re.findall(r"python run ([\w-]+)", text):
            assert f"./run {command}" in listed
        for path in re.findall(r"tests/[\w./]+", text):
            assert (ROOT / path).exists()
    versions = yaml.safe_load(texts["test.yml"])["jobs"]["test"]["strategy"]["matrix"]["python"]
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert versions == classified


def test_the_citation_names_what_a_citation_needs() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= cited.keys()
    assert cited["references"][0]["url"] in (ROOT / "pyproject.toml").read_text()
