"""What tests see of a job."""

from __future__ import annotations

from tests.harness import in_whole_lines


def test_a_line_that_comes_in_pieces_is_not_cut_by_another_streams() -> None:
    pieces = [
        ("stdout", "port"),
        ("stderr", "elaunch: a\nelaunch:"),
        ("stdout", " 1"),
        ("stdout", "\nport "),
        ("stderr", " b\n"),
    ]

    assert in_whole_lines(pieces) == "port 1\nelaunch: a\nelaunch: b\nport "
    assert in_whole_lines(pieces[:2]) == "portelaunch: a\nelaunch:"
