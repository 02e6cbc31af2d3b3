"""Progress: one living line on a terminal, a few plain ones in a log."""

from __future__ import annotations

import io

import pytest

from elaunch.trainer.gpt.progress import Progress, clock, printable, progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, steps: int, speaks: bool = True) -> str:
    progress = Progress(stream, steps=steps, speaks=speaks)
    for step in range(1, steps + 1):
        progress.update({"step": step, "loss": 5.0 / step, "tokens": 100, "seconds": 0.5})
    progress.say("done")
    return stream.getvalue()


def test_a_log_gets_about_ten_lines() -> None:
    lines = run(io.StringIO(), steps=1000).splitlines()

    assert len(lines) == 12
    assert lines[0].startswith("step 1/1000  loss 5.000  200 tokens/s  8:20 left")
    assert lines[1].startswith("step 100/1000")
    assert lines[-2].startswith("step 1000/1000")
    assert lines[-1] == "done"


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    shown = run(Terminal(), steps=50)

    assert shown.count("\r") == 50
    assert shown.count("\n") == 2
    assert shown.endswith("\ndone\n")


def test_other_ranks_are_silent() -> None:
    assert run(io.StringIO(), steps=20, speaks=False) == ""


def test_a_line_has_loss_norm_speed_and_time_left_and_the_mfu_if_it_is_known() -> None:
    line = {"step": 40, "loss": 2.8149, "tokens": 2820, "grad_norm": 0.518, "seconds": 0.6}

    assert progress_line(line, 120, 0.3) == "step 40/120  loss 2.815  norm 0.52  9,400 tokens/s  0:24 left"
    assert "  9,400 tokens/s  MFU 31.0 %  0:24 left" in progress_line({**line, "mfu": 0.155}, 120, 0.3)


def test_a_held_out_loss_is_said_as_that_of_the_weights_before_the_step() -> None:
    stream = io.StringIO()

    Progress(stream, steps=100).update({"step": 51, "loss": 2.0, "held_out_loss": 2.5, "tokens": 9, "seconds": 1.0})

    assert stream.getvalue().startswith("held-out loss 2.500 after step 50\nstep 51/100")


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (24, "0:24"), (725, "12:05"), (3723, "1:02:03")])
def test_times_are_short(seconds: int, shown: str) -> None:
    assert clock(seconds) == shown


def test_generated_bytes_cannot_harm_a_terminal() -> None:
    assert printable(b"def f():\n\t\x1b[2J\xff\r\xc3\xa9") == "def f():\n\\t\\x1b[2J\\xffé"
