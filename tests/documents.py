"""Reads the commands of README.md and docs/*.md: the lines in fences marked `sh` or `console`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.harness import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A comment behind a command is set off by two blanks.
_COMMENT = re.compile(r"\s{2,}# .*$")


@dataclass(frozen=True)
class Block:
    """The commands of one fence, in order, without comments."""

    page: str
    commands: tuple[str, ...]


def fences(page: str) -> Iterator[tuple[str, str]]:
    """The language and the text of each fence of a page."""
    yield from ((found[1], found[2]) for found in _FENCE.finditer(page))


def blocks() -> list[Block]:
    """All fences with commands, of all pages."""
    found = []
    for path in PAGES:
        for language, text in fences(path.read_text()):
            if language in ("sh", "console"):
                found.append(Block(path.name, tuple(_commands(language, text))))
    return found


def _commands(language: str, text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if language == "console" and not line.startswith("$ "):
            continue
        if command := _COMMENT.sub("", line.removeprefix("$ ")).strip():
            yield command
