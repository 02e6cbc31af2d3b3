"""What a rehearsal says about the records of its runs."""

from __future__ import annotations

from typing import Any

from elaunch.launcher.rehearse.compare import difference, repeated, steady, steps_done, unprinted

Records = dict[tuple[str, int], list[dict[str, Any]]]


def begin(step: int, pid: int = 1, *, passes: int = 0, state: str = "", **others: str) -> dict[str, Any]:
    values = {"0.weight": state or f"float32[2] {step}", "random.python.1": f"… {pid}"}
    evaluation = f"seen {step}" if passes else "nothing"
    return {"kind": "begin", "step": step, "pid": pid, "state": values, "others": others, "evaluation": evaluation,
            "passes": passes}  # fmt: skip


def done(step: int, pid: int = 1, samples: str = "", loss: str = "0.5") -> dict[str, Any]:
    return {"kind": "done", "step": step, "pid": pid, "samples": samples or f"of {step}", "losses": [loss], "passes": 1}


def run(*records: dict[str, Any]) -> Records:
    return {("training", 0): list(records)}


ALONE = run(begin(1), done(1), begin(2), done(2), begin(3, passes=2), done(3), begin(4))
# Python's generator has no seed, so its state is another one in each process.
AGAIN = run(*({**r, "pid": 2} for r in ALONE["training", 0]))
for record in AGAIN["training", 0]:
    if record["kind"] == "begin":
        record["state"] = {**record["state"], "random.python.1": "… 2"}


def test_a_restart_that_repeats_a_step_with_the_same_values_is_equal() -> None:
    killed = run(
        begin(1), done(1), begin(2), done(2), begin(2, 5), done(2, 5), begin(3, 5, passes=2), done(3, 5), begin(4, 5)
    )

    assert difference(ALONE, AGAIN, killed) == ""
    assert repeated(killed) == 1
    assert steps_done(killed, "training") == 3


def test_the_first_step_and_the_generator_that_was_not_kept_are_named() -> None:
    noise = "generator `noise`"
    alone, again = (run(*of["training", 0]) for of in (ALONE, AGAIN))
    for of in (alone, again):
        of["training", 0][2] = {**of["training", 0][2], "others": {noise: "uint8[9] 2", "count": "1"}}
    killed = run(begin(1), done(1), begin(2, 5, **{noise: "uint8[9] 0", "count": "0"}), done(2, 5, loss="0.25"),
                 begin(3, 5, passes=2, state="float32[2] 77"), done(3, 5), begin(4, 5))  # fmt: skip

    said = difference(alone, again, killed)

    assert said.startswith("first at step 2 (rank 0): the loss (0.5 alone, 0.25 after)")
    assert "likely reason: the Keeper does not keep generator `noise`: give it as per_rank" in said


def test_a_state_that_the_restart_brings_back_as_another_type_is_named_with_both() -> None:
    killed = run(
        begin(1),
        done(1),
        begin(2, 5, state="bfloat16[2] 2"),
        done(2, 5),
        begin(3, 5, passes=2),
        done(3, 5),
        begin(4, 5),
    )

    said = difference(ALONE, AGAIN, killed)

    assert said.startswith("first at step 2 (rank 0): 0.weight (float32[2] alone, bfloat16[2] after)")
    assert "the restart itself brings other values" in said


def test_an_evaluation_that_a_failure_cut_off_is_missed_but_not_one_that_was_done_before() -> None:
    cut = run(begin(1), done(1), begin(2), done(2), begin(3, 5), done(3, 5), begin(4, 5))
    before = run(begin(1), done(1), begin(2), done(2), begin(3, passes=2), begin(3, 5), done(3, 5), begin(4, 5))

    assert "the evaluation before it (2 passes alone, 0 after)" in difference(ALONE, AGAIN, cut)
    assert difference(ALONE, AGAIN, before) == ""


def test_a_run_that_ends_too_soon_differs() -> None:
    assert "2 steps were done, not 3" in difference(
        ALONE, AGAIN, run(begin(1), done(1), begin(2, 5), done(2, 5), begin(3, 5, passes=2))
    )
    assert "0 steps were done, not 3" in difference(ALONE, AGAIN, {})


def test_words_that_differ_without_a_failure_are_not_compared() -> None:
    lines = steady(["step 1 loss 0.5 12ms", "step 2 loss 0.4 13ms"], ["step 1 loss 0.5 14ms", "step 2 loss 0.4 15ms"])

    assert unprinted(lines, ["step 1 loss 0.5 9ms", "resumed", "step 2 loss 0.3 9ms"]) == ["step 2 loss 0.4 …"]
