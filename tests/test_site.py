"""The site builds strictly, and its reference has every public name."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAME = "dilated_attention_pytorch"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocstrings", reason="needs the extra docs: MkDocs Material and mkdocstrings")
    pytest.importorskip("material", reason="needs the extra docs: MkDocs Material and mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_on_the_site(site) -> None:
    pages = {path.stem for path in ROOT.glob("docs/*.md")} | {"index", "changes", "contributing", "roadmap", "security"}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404", "explorer"}
    front = (site / "index.html").read_text()
    for page in pages - {"index"}:
        assert f'href="{page}.html"' in front, page


def test_signatures_show_defaults_without_help_texts(site) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "models.html").read_text())
    assert "d_model: int = 768," in text
    assert "segment_lengths: tuple[int, ...] = (2048," in re.sub(r"\(\s+", "(", text)
    assert "setting(" not in text


def test_the_explorer_links_back_to_the_site(site) -> None:
    assert '<nav><a href="index.html">' in (site / "explorer.html").read_text()


def test_examples_are_pages_of_text_and_code(site) -> None:
    scripts = {path.stem for path in ROOT.glob("examples/[0-9]*.py")}
    assert {path.stem for path in site.glob("examples/*.html")} == scripts | {"index"}
    for script in scripts:
        page = (site / "examples" / f"{script}.html").read_text()
        assert "<h1" in page
        assert "%%" not in page
        assert f'href="{script}.html"' in (site / "examples" / "index.html").read_text()


def test_the_reference_has_every_public_name_once(site) -> None:
    pages = [path.read_text() for path in sorted(site.glob("reference/*.html"))]
    entries = [re.sub("<[^>]+>", " ", found) for page in pages for found in re.findall(r"(?s)<h2 id=.*?</h2>", page)]
    headings = [entry.split()[0] for entry in entries]
    assert len(headings) == len(set(headings))
    hooks = runpy.run_path(str(ROOT / "docs" / "site.py"))
    rooms = ["", *(room for _, rooms in hooks["REFERENCE"].values() for room in rooms)]
    public = {name for room in rooms for name in hooks["_exported"](room)}
    assert len(public) > 100
    assert {heading.split(".")[-1] for heading in headings} == public
    assert {f"{NAME}.{name}" for name in hooks["_exported"]("")} <= set(headings)


def test_every_public_name_has_an_example_in_its_docstring_or_on_a_page(site) -> None:
    entries = "".join(path.read_text() for path in sorted(site.glob("reference/*.html"))).split("<h2 id=")[1:]
    bare = [entry.split('"')[1] for entry in entries if 'class="gp"' not in entry and "<em>In use:</em>" not in entry]
    assert bare == [f"{NAME}.__version__"]  # its entry shows its value


def test_examples_of_docstrings_are_code_and_links_leave_no_page_behind(site) -> None:
    page = (site / "reference" / "attention.html").read_text()
    assert "<blockquote>" not in page
    assert 'class="gp"' in page  # a highlighted prompt
    assert "../examples/" not in "".join(path.read_text() for path in site.glob("*.html"))
