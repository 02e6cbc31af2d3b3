"""Trainings of many forms, killed and gone on with to the bit: several optimizers and models, averages, meshes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import RankForker, Ranks

SCRIPT = Path(__file__).with_name("forms.py")
STEPS = 5
# One step of each in this turn, so a kill strikes them between two steps, and one in its forward pass.
PAIR = ["muon_fsdp2", "ema", "gan", "zero"]
FOUR = ["fsdp_tp", "hsdp"]
IN_PARTS = {"muon_fsdp2", "zero", *FOUR}


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def begun(forker: RankForker, tmp_path: Path, memory: Path) -> Callable[..., Ranks]:
    def begin(
        world_size: int, forms: list[str], generation: int, *asks: str, folder: str = "run", verify_every: int = 1
    ) -> Ranks:
        (tmp_path / folder).mkdir(exist_ok=True)
        for ask in asks:
            (tmp_path / folder / ask).touch()
        (memory / folder).mkdir(mode=0o700, exist_ok=True)
        env = {"ELAUNCH_GENERATION": str(generation), "ELAUNCH_MEMORY": str(memory / folder)}
        env["VERIFY_EVERY"] = str(verify_every)
        return Ranks(forker, world_size, SCRIPT, str(tmp_path / folder), str(STEPS), *forms, env=env)

    return begin


@pytest.mark.parametrize(("world_size", "forms", "struck"), [(2, PAIR, "gan"), (4, FOUR, "hsdp")])
def test_each_form_goes_on_after_a_kill_as_if_there_had_been_none(
    begun: Callable[..., Ranks], world_size: int, forms: list[str], struck: str
) -> None:
    with begun(world_size, forms, 0, folder="calm") as ranks:
        calm = ranks.answers()
    with begun(world_size, forms, 0, f"forward-{struck}-0-3-1") as ranks:
        assert ranks.end_of(1).code == -9
        ranks.end()

    with begun(world_size, forms, 1) as ranks:
        resumed = ranks.answers()

    for rank in range(world_size):
        before, after = calm[rank]["forms"], resumed[rank]["forms"]
        assert {form: its["digest"] for form, its in after.items()} == {f: its["digest"] for f, its in before.items()}
        began = {form: its["began"] for form, its in after.items()}
        # Step 3 of the forms before that one is complete, and for that one and those the snapshot of step 2 is made.
        # What is in parts goes back to its snapshot.
        expected = {form: 3 if forms.index(form) < forms.index(struck) else 2 for form in forms}
        for form in IN_PARTS & set(forms):
            expected[form] = 2 if forms.index(form) <= forms.index(struck) else 1
        assert began == expected
        assert not [logged for logged in (*calm[rank]["logged"], *resumed[rank]["logged"]) if "outside" in logged]


def test_a_rank_that_dies_in_a_collective_of_the_optimizer_costs_the_steps_since_the_snapshot(
    begun: Callable[..., Ranks],
) -> None:
    with begun(2, ["collective"], 0, folder="calm") as ranks:
        calm = ranks.answers()
    with begun(2, ["collective"], 0, "step-collective-0-4-1") as ranks:
        assert ranks.end_of(1).code == -9
        # Not a hang: the collective of the other rank fails, and its state is that of no step.
        assert ranks.end_of(0).code == 1

    with begun(2, ["collective"], 1) as ranks:
        resumed = ranks.answers()

    assert [answer["forms"]["collective"]["began"] for answer in resumed] == [3, 3]
    assert [answer["forms"]["collective"]["digest"] for answer in resumed] == [
        answer["forms"]["collective"]["digest"] for answer in calm
    ]


def test_a_damaged_copy_is_found_and_no_state_since_the_last_comparison_is_used(begun: Callable[..., Ranks]) -> None:
    with begun(3, ["ddp"], 0, folder="calm") as ranks:
        calm = ranks.answers()
    # Compared after steps 2 and 4. Rank 1's weight changes in step 3: the gradients of steps 3 and 4 are wrong on all.
    with begun(3, ["ddp"], 0, "corrupt-ddp-0-3-1", verify_every=2) as ranks:
        ended = ranks.end()

    with begun(3, ["ddp"], 1, verify_every=2) as ranks:
        resumed = ranks.answers()

    assert [rank.code for rank in ended] == [1, 1, 1]
    for rank in ended:
        assert "Differs: rank 1's copy of `0.weight` on " in rank.err
        assert "differs from the other 2 ranks' after step 4: silent data corruption" in rank.err
        assert "goes back to step 2" in rank.err
    assert [answer["forms"] for answer in resumed] == [
        {"ddp": {"began": 2, "digest": answer["forms"]["ddp"]["digest"]}} for answer in calm
    ]
    (logged,) = resumed[0]["logged"]
    assert logged.startswith("restored step 2 from memory (of generation 0); 2 steps are repeated, since ")
