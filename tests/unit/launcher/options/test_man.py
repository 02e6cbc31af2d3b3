"""The manual page: made from the texts of --help, and rendered without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from elaunch.launcher.options.commands import COMMANDS
from elaunch.launcher.options.help import help_text
from elaunch.launcher.options.man import manual
from elaunch.launcher.options.table import TABLE
from tests.harness import REPOSITORY, RUN_LIMIT_S

PAGE = REPOSITORY / "docs" / "elaunch.1"


def test_the_page_is_the_one_that_the_commands_make() -> None:
    assert PAGE.read_text() == manual()


def test_help_has_every_exit_code_of_the_page_about_them() -> None:
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text()

    codes = re.findall(r"^\| ([0-9]+|128 \+ N) \|", page, re.MULTILINE)
    assert len(codes) >= 5
    for code in codes:
        assert re.search(rf"[:, \n]{re.escape(code)}\s", help_text()), code


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_renders_it_without_a_warning_and_with_every_option_and_command() -> None:
    rendered = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", "-P-cbou", str(PAGE)],
        capture_output=True,
        text=True,
        check=True,
        timeout=RUN_LIMIT_S,
    )

    assert rendered.stderr == ""
    for option in TABLE:
        assert f"--{option.long}" in rendered.stdout
    for command in {*COMMANDS} - {"run"}:
        assert f"Usage: elaunch {command}" in rendered.stdout
