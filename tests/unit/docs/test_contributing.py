"""CONTRIBUTING.md: each folder is in its table, and each path that it names is there."""

from __future__ import annotations

import re

import pytest

from tests.harness import REPOSITORY

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()
ROOMS = ("agent", "launcher", "rendezvous", "trainer")


def section(title: str) -> list[list[str]]:
    """The rows of the one table below a heading, as cells."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


CHANGES = [row for row in section("Where a change begins") if not row[0].startswith("**")]


def paths(text: str) -> list[str]:
    """The paths of this repository that a text names in backticks."""
    words = [word.partition(" ")[0] for word in re.findall(r"`([^`\n]+)`", text)]
    return [
        word
        for word in words
        if re.fullmatch(r"(?!~)[\w.-]+(/[\w.-]+)*/?", word) and re.search(r"/|\.|^Makefile$", word)
    ]


def test_the_folders_of_the_four_rooms_are_the_table() -> None:
    named = {name.strip("*`") for name, _ in section("The rooms and their folders")}
    there = {f"{path.parent.relative_to(REPOSITORY)}/" for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")}

    assert named == there


def test_each_change_names_its_file_and_what_guards_it() -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))

    assert len(CHANGES) >= 10
    for change, files, guards in CHANGES:
        assert [path for path in paths(files) if (REPOSITORY / path).exists()], change
        tests = [path for path in paths(guards) if path.startswith("tests/") and path.endswith(".py")]
        assert tests or set(re.findall(r"`make ([\w-]+)`", guards)) & targets, change


# What `make ecosystem` makes is not in a checkout.
@pytest.mark.parametrize("path", sorted({path for path in paths(PAGE) if "/" in path and path[:5] != ".venv"}))
def test_each_path_is_there(path: str) -> None:
    assert (REPOSITORY / path).exists()
