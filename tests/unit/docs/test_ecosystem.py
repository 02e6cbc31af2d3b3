"""docs/ecosystem.md: each library has a section with a command, and each program is in the registry."""

from __future__ import annotations

import re

import pytest

from tests.ecosystem.registry import FOLDER, PROGRAMS
from tests.harness import REPOSITORY

SECTIONS = re.split(r"^## ", (REPOSITORY / "docs" / "ecosystem.md").read_text(), flags=re.MULTILINE)[1:]
# Programs of libraries that have their section under another name.
NAMES = {"none": "torch", "LightningCLI": "Lightning"}


@pytest.mark.parametrize("library", sorted({program.library for program in PROGRAMS}))
def test_each_library_has_a_section_of_a_few_lines_with_a_command(library: str) -> None:
    title = NAMES.get(library, library)

    (text,) = [section for section in SECTIONS if section.splitlines()[0] == title]

    assert len(re.findall(r"^(?!```)\S.*", text.partition("```sh")[0], re.MULTILINE)) == 6
    assert re.search(r"^```sh\n.*elaunch --nproc-per-node", text, re.MULTILINE)


def test_each_program_is_in_the_registry() -> None:
    files = {path.name for path in FOLDER.glob("*.py")} - {"common.py"}

    assert files | {"package/train.py"} == {program.file for program in PROGRAMS}
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
