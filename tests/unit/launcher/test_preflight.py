"""Checks on this host before the job starts."""

from __future__ import annotations

import pytest

from elaunch.launcher.preflight import temporary_folder_warning


@pytest.mark.parametrize(
    ("folder", "warning"),
    [("", ""), ("/tmp", ""), ("/" + 74 * "x", ""), ("/" + 37 * "é", ""), ("/" + 75 * "x", "TMPDIR has 76 characters")],
)
def test_a_temporary_folder_too_long_for_sockets_is_named(folder: str, warning: str) -> None:
    said = temporary_folder_warning({"TMPDIR": folder})

    assert said.startswith(warning)
    assert bool(said) == bool(warning)
