"""docs/ecosystem.md: each library has a row, and each program is in the registry."""

from __future__ import annotations

import pytest

from tests.ecosystem.registry import FOLDER, PROGRAMS
from tests.harness import REPOSITORY

ROWS = {
    line.split(" | ")[0].removeprefix("| ")
    for line in (REPOSITORY / "docs" / "ecosystem.md").read_text().splitlines()
    if line.startswith("| ")
}
# Programs of libraries that have their row under another name.
NAMES = {"none": "torch", "LightningCLI": "Lightning"}


@pytest.mark.parametrize("library", sorted({program.library for program in PROGRAMS}))
def test_each_library_has_a_row(library: str) -> None:
    assert NAMES.get(library, library) in ROWS


def test_each_program_is_in_the_registry() -> None:
    files = {path.name for path in FOLDER.glob("*.py")} - {"common.py"}

    assert files | {"package/train.py"} == {program.file for program in PROGRAMS}
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
