"""The manual page: made from the texts of --help, and rendered without a warning."""

from __future__ import annotations

import re

from elaunch.launcher.options.help import help_text
from elaunch.launcher.options.man import manual
from tests.harness import REPOSITORY

PAGE = REPOSITORY / "docs" / "elaunch.1"


def test_the_page_is_the_one_that_the_commands_make() -> None:
    assert PAGE.read_text() == manual()


def test_help_has_every_exit_code_of_the_page_about_them() -> None:
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text()

    codes = re.findall(r"^\| ([0-9]+|128 \+ N) \|", page, re.MULTILINE)
    assert len(codes) >= 5
    for code in codes:
        assert re.search(rf"[:, \n]{re.escape(code)}\s", help_text()), code
