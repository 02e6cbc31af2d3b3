"""`make size`: the repository's sizes beside their budgets, and the files of docs/architecture.md's three walks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILES_MAX = {"launcher": 55, "agent": 75, "rendezvous": 36, "trainer": 84}
TESTS_LINES_MAX = 60_000
WORDS_MAX = {"docs": 45_000, "README.md": 900, "CONTRIBUTING.md": 1_500}
_DOCS = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# In the order of the page: a kill, a start on two nodes, a Keeper's commit.
WALKS_MAX = (30, 55, 24)
_STEP = re.compile(r"`([\w/]+\.py)`(?: \((`[\w.]+`(?:, `[\w.]+`)*)\))?")


def walks() -> dict[str, dict[str, set[str]]]:
    """Of each walk the files, each with the names that the walk gives in it."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Three walks\n")[2].partition("\n## ")[0]
    found: dict[str, dict[str, set[str]]] = {}
    for walk in section.split("\n### ")[1:]:
        files = found.setdefault(walk.partition("\n")[0].replace("`", ""), {})
        for file, names in _STEP.findall(walk):
            files.setdefault(file, set()).update(re.findall(r"[\w.]+", names))
    return found


def _texts(*paths: str, ending: str) -> list[str]:
    command = ("git", "ls-files", *paths)
    listed = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    files = [REPOSITORY / file for file in listed.splitlines() if file.endswith(ending)]
    return [file.read_text() for file in files if file.is_file()]


def _row(what: str, there: int, most: int) -> None:
    print(f"{what:60} {there:7,} of {most:7,}{'' if there <= most else '  TOO LARGE'}")


def main() -> None:
    for room, most in FILES_MAX.items():
        texts = _texts(room, ending=".py")
        lines = sum(text.count("\n") for text in texts)
        _row(f"{room}: files ({lines:,} lines)", len(texts), most)
    _row("tests: lines", sum(text.count("\n") for text in _texts("tests", ending=".py")), TESTS_LINES_MAX)
    for page, most in WORDS_MAX.items():
        paths = _DOCS if page == "docs" else (page,)
        _row(f"{page}: words", sum(len(text.split()) for text in _texts(*paths, ending=".md")), most)
    for (walk, files), most in zip(walks().items(), WALKS_MAX, strict=True):
        _row(f"{walk}: files", len(files), most)


if __name__ == "__main__":
    main()
