"""The commands that the README and the pages show exist, with the flags they show."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.command import parser as bench_parser
from dilated_attention_pytorch.cli import _parser
from dilated_attention_pytorch.slides.command import parser as slides_parser
from dilated_attention_pytorch.train import command as training
from examples.evidence.__main__ import parser as evidence_parser
from examples.recall import parser as recall_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_THE_SCRIPT = {"test", "docs", "help"}  # which ./run has beside the command line's
SHOWN = re.compile(r"(?:\./run|dilated-attention) ([a-z]+)(.*)")


def parse(command: str, arguments: list[str]) -> None:
    training.parse_flags(arguments) if command == "train" else commands()[command].parse_args(arguments)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0].choices if found else {}


def flags_of(command: str, rest: str) -> set[str]:
    """The flags of a command, or of the subcommand that the rest of its line names."""
    if command == "train":
        short = [field.metadata["short"] for _, field in training.SETTINGS.values()]
        return {"--" + name.replace("_", "-") for name in (*training._STARTING, *training.SETTINGS, *short)}
    parser = commands()[command]
    return set(subcommands(parser).get(rest.split()[0], parser)._option_string_actions)


def commands() -> dict[str, argparse.ArgumentParser]:
    return subcommands(_parser()) | {
        "bench": bench_parser(),
        "recall": recall_parser(),
        "evidence": evidence_parser(),
        "slides": slides_parser(),
    }


def blocks(page: Path) -> str:
    """What stands in blocks of shell commands, or of no language."""
    fenced = re.findall(r"^```([a-z]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(text for language, text in fenced if language in ("", "bash")).replace("\\\n", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_blocks_are_taken_as_they_stand(page) -> None:
    for command, rest in SHOWN.findall(blocks(page)):
        if command not in OF_THE_SCRIPT:
            parse(command, shlex.split(rest, comments=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_text_have_the_flags_that_it_names(page) -> None:
    for command, rest in re.findall(r"`(?:\./run|dilated-attention) ([a-z]+)([^`]*)`", page.read_text()):
        assert command in commands().keys() | OF_THE_SCRIPT, command
        for flag in re.findall(r"--[a-z0-9-]+", rest) if command in commands() else ():
            assert flag in flags_of(command, rest), f"{command} {flag}"


def test_the_pages_show_every_command() -> None:
    shown = {command for page in PAGES for command, _ in SHOWN.findall(page.read_text())}
    assert commands().keys() | OF_THE_SCRIPT <= shown
