"""What a rehearsal says about the records of its runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from elaunch.launcher.rehearse.compare import difference, repeated, steps_done, unprinted

Records = dict[tuple[str, int], list[dict[str, Any]]]
EVALUATED = {"the evaluation after it": "done 12"}


def begin(step: int, pid: int = 1, facts: dict[str, str] | None = None, **others: str) -> dict[str, Any]:
    values = {"0.weight": f"float32[2] {step}", "random.python.1": f"… {pid}"}
    return {"step": step, "pid": pid, "facts": {**values, **(facts or {})}, "others": others}


def run(*records: dict[str, Any]) -> Records:
    """Each process has computed the steps between its records."""
    for before, now in pairwise(records):
        if before["pid"] == now["pid"]:
            now["facts"] = {"the samples": f"done {now['step']}", "the loss": "0.5", **now["facts"]}
    return {("training", 0): list(records)}


ALONE = run(begin(1), begin(2), begin(3, 1, EVALUATED), begin(4))
# Python's generator has no seed, so its state is another one in each process.
AGAIN = run(begin(1, 2), begin(2, 2), begin(3, 2, EVALUATED), begin(4, 2))


def test_a_restart_that_repeats_a_step_with_the_same_values_is_equal() -> None:
    killed = run(begin(1), begin(2), begin(3, 1, EVALUATED), begin(2, 5), begin(3, 5, EVALUATED), begin(4, 5))

    assert difference(ALONE, AGAIN, killed) == ""
    assert repeated(killed) == 1
    assert steps_done(killed, "training") == 3


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

    said = difference(alone, again, killed)

    assert said.startswith("first after step 2 (rank 0): the loss (0.5 alone, 0.25 after)")
    assert "likely reason: the Keeper does not keep generator `noise`: give it as per_rank" in said


def test_a_state_that_the_restart_brings_back_as_another_type_is_named_with_both() -> None:
    killed = run(begin(1), begin(2, 5, {"0.weight": "bfloat16[2] 2"}), begin(3, 5, EVALUATED), begin(4, 5))

    said = difference(ALONE, AGAIN, killed)

    assert said.startswith("first after step 1 (rank 0): 0.weight (float32[2] alone, bfloat16[2] after)")
    assert "the restored values differ" in said


def test_an_evaluation_that_a_failure_cut_off_is_missed_but_not_one_that_was_done_before() -> None:
    cut = run(begin(1), begin(2), begin(3, 5), begin(4, 5))
    before = run(begin(1), begin(2), begin(3, 1, EVALUATED), begin(3, 5), begin(4, 5))

    assert "the evaluation after it (done alone, absent after)" in difference(ALONE, AGAIN, cut)
    assert difference(ALONE, AGAIN, before) == ""


def test_two_quiet_runs_with_other_losses_differ_and_with_another_generator_do_not() -> None:
    other = run(begin(1, 2), begin(2, 2, {"the loss": "0.7"}), begin(3, 2, EVALUATED), begin(4, 2))

    assert difference(ALONE, other, other).startswith("first after step 1 (rank 0): the loss (0.5 alone, 0.7 after)")
    assert difference(ALONE, AGAIN, AGAIN) == ""


def test_a_run_that_ends_too_soon_differs() -> None:
    assert "2 steps were done, not 3" in difference(ALONE, AGAIN, run(begin(1), begin(2, 5), begin(3, 5, EVALUATED)))
    assert "0 steps were done, not 3" in difference(ALONE, AGAIN, {})


def test_words_that_differ_without_a_failure_are_not_compared() -> None:
    alone, again = ["step 1 loss 0.5 12ms", "step 2 loss 0.4 13ms"], ["step 1 loss 0.5 14ms", "step 2 loss 0.4 15ms"]

    assert unprinted(alone, again, ["step 1 loss 0.5 9ms", "resumed", "step 2 loss 0.3 9ms"]) == ["step 2 loss 0.4 …"]
