"""The manual page: made from the table, and rendered without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from elaunch.launcher.options.help import help_text
from elaunch.launcher.options.man import EXIT_CODES, manual, roff
from elaunch.launcher.options.table import TABLE
from tests.harness import REPOSITORY, RUN_LIMIT_S

PAGE = REPOSITORY / "docs" / "elaunch.1"


def test_the_page_is_the_one_that_the_table_makes() -> None:
    assert PAGE.read_text() == manual()


def test_help_and_the_page_of_exit_codes_have_every_code() -> None:
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text()

    for code, _ in EXIT_CODES:
        assert re.search(rf"[:, \n]{re.escape(code)}\s", help_text())
        assert f"\n| {code} |" in page


def test_it_is_ascii_and_what_looks_like_a_request_is_text() -> None:
    assert manual().isascii()
    assert roff(".TH is – not a request, don't \\break") == "\\&.TH is \\[u2013] not a request, don\\(aqt \\ebreak"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_renders_it_without_a_warning_and_with_every_option_and_exit_code() -> None:
    rendered = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", "-P-cbou", str(PAGE)],
        capture_output=True,
        text=True,
        check=True,
        timeout=RUN_LIMIT_S,
    )

    assert rendered.stderr == ""
    for spec in TABLE:
        assert f"--{spec.name}" in rendered.stdout
    for code, _ in EXIT_CODES:
        assert f"\n       {code}" in rendered.stdout
