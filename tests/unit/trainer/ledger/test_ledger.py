"""The ledger: exactly-once is proved, and every planted lie is found."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elaunch.trainer.data.order import Order
from elaunch.trainer.ledger.__main__ import main
from elaunch.trainer.ledger.audit import Verdict, verdict
from elaunch.trainer.ledger.ledger import Ledger, audit_folder, next_generation

ORDER = Order(50, seed=7, global_batch=12, micro_batch=2)
Record = dict[str, Any]
Files = dict[tuple[int, int], list[Record]]


def work(
    folder: Path,
    generation: int,
    world_size: int,
    after: int,
    until: int,
    *,
    order: Order = ORDER,
    killed: int | None = None,
) -> None:
    """Write the ledger of one generation, which begins after step `after` and ends with step `until`.

    With `killed`, that rank computes only half of the next step. The others compute all of it, and no rank commits it.
    """
    for rank in range(world_size):
        with Ledger(folder, order, rank=rank, world_size=world_size, generation=generation, after=after) as ledger:
            for step in range(after + 1, until + 1):
                for micro in order.parts(step, rank, world_size):
                    ledger.record(step, micro)
                ledger.commit(step)
            if killed is not None:
                parts = order.parts(until + 1, rank, world_size)
                for micro in parts[: len(parts) // 2] if rank == killed else parts:
                    ledger.record(until + 1, micro)


def stormy(folder: Path) -> Files:
    """Three generations of 4, 3 and 4 workers. The second repeats no step, the third repeats steps 9 and 10."""
    work(folder, 0, 4, 0, 5, killed=2)
    work(folder, 1, 3, 5, 10, killed=0)
    work(folder, 2, 4, 8, 14)
    return {
        (generation, rank): [json.loads(line) for line in path.read_text().splitlines()]
        for generation, world_size in ((0, 4), (1, 3), (2, 4))
        for rank in range(world_size)
        for path in [folder / f"generation-{generation:04d}-rank-{rank:05d}.jsonl"]
    }


def judged(files: Files, **options: int) -> Verdict:
    return verdict(([json.dumps(row) + "\n" for row in rows] for rows in files.values()), **options)


def at(files: Files, generation: int, step: int, micro: int | None = None) -> tuple[list[Record], int]:
    """The rows that have that line, and its index. Without `micro`, the line of a step that is done."""
    for (number, _), rows in files.items():
        for place, row in enumerate(rows):
            found = row.get("done") == step if micro is None else (row.get("step"), row.get("micro")) == (step, micro)
            if number == generation and found:
                return rows, place
    raise AssertionError((generation, step, micro))


def test_a_run_with_failures_and_resizes_is_proved(tmp_path: Path) -> None:
    stormy(tmp_path)

    found = audit_folder(tmp_path, steps=14)

    assert found == Verdict(
        True,
        "exactly once: steps 1 to 14 in 3 generations, 168 samples, none missing and none twice within an epoch; 2 "
        "steps that were done were lost and computed again",
        steps=14,
        samples=168,
        lost_steps=2,
        repeated_steps=2,
    )


@pytest.mark.parametrize("seed", range(8))
def test_any_honest_history_is_proved(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    order = dice.choice(
        (
            ORDER,
            Order(50, global_batch=12, micro_batch=2, even=True),
            Order(50, global_batch=12, micro_batch=2, shuffle=False),
        )
    )
    lost = 0
    reached: list[int] = []
    for generation in range(dice.randint(1, 8)):
        # Some generations go on where the last one stopped. Some go back, some of them to before its beginning.
        after = reached[-1] - dice.choice((0, 0, 1, 4)) if reached else 0
        after = max(after, 0)
        until = after + dice.randint(0, 6)
        killed = dice.choice((None, 0))
        work(tmp_path, generation, dice.randint(1, 6), after, until, order=order, killed=killed)
        lost += sum(step > after for step in reached)
        reached = [*(step for step in reached if step <= after), *range(after + 1, until + 1)]

    found = audit_folder(tmp_path)

    assert found.ok, (seed, found.text)
    assert found.steps == (reached[-1] if reached else 0)
    assert found.lost_steps == lost


def lose_a_line(files: Files) -> None:
    rows, place = at(files, 1, 7, 3)
    del rows[place]


def lose_a_step(files: Files) -> None:
    for rows in files.values():
        rows[:] = [row for row in rows if row.get("step", row.get("done")) != 7]


def lose_the_last_step_before_a_restart(files: Files) -> None:
    for (generation, _), rows in files.items():
        if generation == 0:
            rows[:] = [row for row in rows if row.get("step", row.get("done", 0)) < 5]


def compute_a_micro_batch_twice(files: Files) -> None:
    rows, place = at(files, 2, 12, 1)
    others, other = at(files, 2, 12, 5)
    others.insert(other, rows[place])


def compute_a_step_again_that_counts(files: Files) -> None:
    for rank in range(4):
        files[2, rank][0]["after"] = 9


def swap_two_samples(files: Files) -> None:
    rows, place = at(files, 0, 2, 2)
    others, other = at(files, 0, 3, 4)
    a, b = rows[place]["samples"], others[other]["samples"]
    a[0], b[0] = b[0], a[0]


def change_a_sample_of_the_lost_step(files: Files) -> None:
    rows, place = at(files, 1, 9, 2)
    rows[place]["samples"] = [0, 1]


def change_the_order(files: Files) -> None:
    files[2, 1][0]["order"]["seed"] = 8


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        (lose_a_line, "micro-batch 3 of step 7 was computed by no rank"),
        (lose_a_step, "step 7 is missing; generation 1 continued with step 8"),
        (lose_the_last_step_before_a_restart, "generation 1 began after step 5, but steps from 5 on are missing"),
        (compute_a_micro_batch_twice, "micro-batch 1 of step 12 was computed twice in generation 2, by ranks 1 and 3"),
        (compute_a_step_again_that_counts, "generation 2 began after step 9 and computed step 9 again"),
        (swap_two_samples, "micro-batch 2 of step 2 had samples"),
        (change_a_sample_of_the_lost_step, r"step 9 had samples \[0, 1\] in generation 1"),
        (change_the_order, "the ranks had different orders, Order.*seed=8"),
    ],
)
def test_a_planted_lie_is_found(tmp_path: Path, lie: Callable[[Files], None], sentence: str) -> None:
    files = stormy(tmp_path)
    assert judged(files).ok
    lie(files)

    found = judged(files)

    assert not found.ok
    with pytest.raises(ValueError, match=sentence):
        raise ValueError(found.text)


RULE = {"size": 8, "global_batch": 4, "micro_batch": 2, "seed": 0, "shuffle": True, "even": False}
HEADER = {"ledger": 1, "generation": 0, "rank": 0, "world_size": 1, "after": 0, "order": RULE}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{**HEADER, "ledger": "x" * 10_000}], "it has format x{80}, and only format 1 is known here"),
        ([HEADER, {"step": 0, "micro": 0, "samples": [0]}], "a line of rank 0 in generation 0 is invalid: .*"),
    ],
    ids=["another format", "a step before the first"],
)
def test_what_is_no_ledger_is_named_in_a_line(rows: list[Record], sentence: str) -> None:
    assert re.fullmatch(f"not exactly once: {sentence}", judged({(0, 0): rows}).text)


def test_an_order_that_repeats_samples_is_found_though_all_ranks_keep_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No permutation, but it claims to be the order in the ledger's header.
    monkeypatch.setattr(Order, "sample", lambda _, position: position % 49)
    work(tmp_path, 0, 2, 0, 5)

    found = audit_folder(tmp_path)

    assert not found.ok
    assert "sample 0 occurs twice in epoch 0, the second time in step 5" in found.text


def test_a_step_that_was_done_and_saved_counts_though_no_rank_lived_to_record_it(tmp_path: Path) -> None:
    for rank in range(2):
        with Ledger(tmp_path, ORDER, rank=rank, world_size=2, generation=0, after=0) as ledger:
            for micro in ORDER.parts(1, rank, 2):
                ledger.record(1, micro)
    work(tmp_path, 1, 3, 1, 2)

    assert audit_folder(tmp_path, steps=2).ok


def test_no_run_writes_over_an_earlier_ones_ledger(tmp_path: Path) -> None:
    assert next_generation(tmp_path, 2) == 2
    work(tmp_path, 2, 2, 0, 1)

    with pytest.raises(FileExistsError, match="take next_generation"):
        work(tmp_path, 2, 2, 1, 2)
    assert next_generation(tmp_path, 0) == next_generation(tmp_path, 3) == 3
    work(tmp_path, 3, 2, 1, 2)
    assert audit_folder(tmp_path, steps=2).ok


def test_the_command_prints_one_sentence_and_exits_with_the_verdict(tmp_path: Path) -> None:
    work(tmp_path, 0, 2, 0, 3)
    (tmp_path / "empty").mkdir()

    def ran(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, arguments)
        return result.exit_code, result.output

    proved, wrong = ran(str(tmp_path)), ran(str(tmp_path), "--steps", "4")
    assert proved[0] == 0
    assert proved[1].startswith("exactly once: steps 1 to 3 ")
    assert wrong == (1, "not exactly once: the last step that counts is 3, not 4\n")
    assert ran(str(tmp_path / "empty")) == (1, "the ledger holds no steps\n")
    assert ran(str(tmp_path / "nowhere"))[0] == 2
