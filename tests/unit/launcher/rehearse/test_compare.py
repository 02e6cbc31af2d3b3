"""What a rehearsal reports about the records and the output of its runs."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import pytest

from elaunch.launcher.rehearse.command import Fault, Run, _rehearse
from elaunch.launcher.rehearse.compare import Records, alike, computed, difference, repeated, steps_done

EVALUATED = {"the evaluation after it": "done 12"}


def begin(step: int, pid: int = 1, facts: dict[str, str] | None = None, **own: str) -> dict[str, Any]:
    values = {"0.weight": f"float32[2] {step}", "random.python.1": f"… {pid}"}
    return {"step": step, "pid": pid, "facts": {**values, **(facts or {}), **{f"~{key}": own[key] for key in own}}}


def run(*records: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Each process has computed the steps between its records."""
    for before, now in pairwise(records):
        if before["pid"] == now["pid"]:
            now["facts"] = {"the samples": f"done {now['step']}", "the loss": "0.5", **now["facts"]}
    return {("training", 0): list(records)}


ALONE = run(begin(1), begin(2), begin(3, 1, EVALUATED), begin(4))
# Python's generator has no seed, so its state is another one in each process.
AGAIN = run(begin(1, 2), begin(2, 2), begin(3, 2, EVALUATED), begin(4, 2))


def found_in(killed: Records, alone: Records = ALONE, again: Records = AGAIN) -> tuple[str, str]:
    return difference(alike(alone, again), killed)


def test_a_restart_that_repeats_a_step_with_the_same_values_is_equal() -> None:
    killed = run(begin(1), begin(2), begin(3, 1, EVALUATED), begin(2, 5), begin(3, 5, EVALUATED), begin(4, 5))

    assert found_in(killed) == ("", "")
    assert repeated(killed) == 1
    assert steps_done(killed) == 3


def test_the_first_step_and_the_generator_that_was_not_kept_are_named() -> None:
    noise = "generator `noise`"
    alone, again = (
        run(begin(1, pid), begin(2, pid, {}, **{noise: "uint8[9] 2", "count": "1"}), begin(3, pid), begin(4, pid))
        for pid in (1, 2)
    )
    killed = run(
        begin(1),
        begin(2, 5, {}, **{noise: "uint8[9] 0", "count": "0"}),
        begin(3, 5, {"the loss": "0.25"}),
        begin(4, 5, {"0.weight": "float32[2] 77"}),
    )

    what, reason = found_in(killed, alone, again)

    assert what == "first after step 2 (rank 0): the loss (0.25, not 0.5)"
    assert reason == "the Keeper does not keep generator `noise`: pass it as per_rank=[…]"


def test_other_samples_are_the_data_order_before_a_counter_that_began_again() -> None:
    alone, again = (run(begin(1, pid), begin(2, pid, {}, seen="1"), begin(3, pid), begin(4, pid)) for pid in (1, 2))
    killed = run(begin(1), begin(2, 5, {}, seen="0"), begin(3, 5, {"the samples": "done 9"}), begin(4, 5))

    what, reason = found_in(killed, alone, again)

    assert what == "first after step 2 (rank 0): the samples (done 9, not done 3)"
    assert reason.startswith("the data begin again: pass per_rank=Batches(loader). Or the Keeper does not keep `seen`")


def test_an_average_that_differs_at_the_end_is_a_difference_and_a_counter_is_none() -> None:
    def ended(pid: int, average: str, count: str) -> dict[str, Any]:
        return begin(4, pid, {}, **{"ema.weight": average, "count": count})

    alone, again = (run(begin(1, pid), begin(2, pid), ended(pid, "float32[2] 4", "3")) for pid in (1, 2))

    lost = found_in(run(begin(1), begin(2, 5), ended(5, "float32[2] 9", "2")), alone, again)
    kept = found_in(run(begin(1), begin(2, 5), ended(5, "float32[2] 4", "2")), alone, again)

    assert lost[0] == "at the end (rank 0): ema.weight (float32[2] 9, not float32[2] 4)"
    assert lost[1].startswith("the Keeper does not keep `ema`: pass it (extra=")
    assert kept == ("", "")


def test_an_evaluation_that_a_failure_cut_off_is_missed_but_not_one_that_was_done_before() -> None:
    cut = run(begin(1), begin(2), begin(3, 5), begin(4, 5))
    before = run(begin(1), begin(2), begin(3, 1, EVALUATED), begin(3, 5), begin(4, 5))

    assert found_in(cut)[0] == "first after step 2 (rank 0): the evaluation after it (absent, not done 12)"
    assert found_in(before) == ("", "")


def test_two_quiet_runs_with_other_losses_differ_and_with_another_generator_do_not() -> None:
    other = run(begin(1, 2), begin(2, 2, {"the loss": "0.7"}), begin(3, 2, EVALUATED), begin(4, 2))

    assert difference(computed(ALONE), other)[0] == "first after step 1 (rank 0): the loss (0.7, not 0.5)"
    assert difference(computed(ALONE), AGAIN)[0] == ""


def test_a_run_that_ends_too_soon_differs() -> None:
    assert "2 steps were done, not 3" in found_in(run(begin(1), begin(2, 5), begin(3, 5, EVALUATED)))[0]
    assert "0 steps were done, not 3" in found_in({})[0]


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
