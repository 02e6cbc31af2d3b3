"""The verdict of a rehearsal of a script without a Keeper."""

from __future__ import annotations

from itertools import count

import pytest

from elaunch.launcher.rehearse.command import Fault, Run, _rehearse


def rehearsed(*lines: str) -> int:
    """Each run prints these lines, with a number of its own for %."""
    runs = count()

    def run(fault: Fault) -> Run:
        number = str(next(runs))
        return Run(0, 1.0, bool(fault.lines), {}, [line.replace("%", number) for line in lines], 1, "")

    return _rehearse(run)


def test_how_much_was_compared_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearsed("begin at %", "loss 0.5", "took % s", "done") == 0

    assert "compared: 2 of 4 lines of output" in capsys.readouterr().out


@pytest.mark.parametrize("lines", [("loss 0.5 at %", "done"), ("begin", "done"), ("% s",), ()])
def test_nothing_is_called_equal_where_no_result_can_be_compared(
    lines: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(*lines) == 1

    shown = capsys.readouterr().out
    assert "nothing can be compared: of " in shown
    assert "equal:" not in shown
