"""A rank is killed inside the Keeper's own work: no rank waits for ever, no step is lost, and all bits are right.

Kills in the program's steps, and in copies of the whole state, are in test_keeper_kills.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults.keeper_runs import Recorded
from tests.ranks import Ended, RankForker, Ranks

SCRIPT = Path(__file__).with_name("paths.py")
STEPS = 9
# A look after each step; snapshots after steps 1, 5 and 9; comparisons after steps 3, 6 and 9.
DDP = ("ddp", "lose_at_most=4")
COMPARED = (*DDP, "verify_every=3")
FSDP2 = ("fsdp2", "lose_at_most=1", "snapshot_every=4")

pytestmark = pytest.mark.slow


class Job(Recorded):
    """A training of that many ranks in `folder`, on one node, or each rank on a node of its own."""

    def __init__(self, forker: RankForker, folder: Path, memory: Path, ranks: int, nodes: int, *words: str) -> None:
        super().__init__(folder)
        folder.mkdir()
        self._forker, self.memory, self._ranks, self._words = forker, memory, ranks, words
        self._place = {rank: str(rank % nodes) for rank in range(ranks)}
        # The digests that ranks have printed, by step.
        self.digests: dict[int, set[str]] = {}

    def generation(self, number: int, *asks: str) -> list[Ended]:
        """Run that generation with these moments. Returns how each of its ranks ended."""
        for ask in asks:
            (self.folder / ask).touch()
        envs = {}
        for rank, node in self._place.items():
            (self.memory / node).mkdir(exist_ok=True)
            envs[rank] = {
                "ELAUNCH_MEMORY": str(self.memory / node),
                "LOCAL_RANK": str(rank // len({*self._place.values()})),
            }
        words = (str(self.folder), str(STEPS), *self._words)
        env = {"ELAUNCH_GENERATION": str(number)}
        with Ranks(self._forker, self._ranks, SCRIPT, *words, env=env, envs=envs) as ranks:
            ended = ranks.end()
        for rank in ended:
            for note in rank.notes:
                if "step" in note:
                    self.digests.setdefault(note["step"], set()).add(note["digest"])
        return ended


@pytest.fixture(scope="module")
def job(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:

        def made(ranks: int, nodes: int, *words: str) -> Job:
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            return Job(forker, tmp_path_factory.mktemp("job") / "run", memory, ranks, nodes, *words)

        yield made


@pytest.fixture(scope="module")
def calm(job: Callable[..., Job]) -> Callable[..., dict[int, set[str]]]:
    """The digests of a training of that kind without failures."""

    @cache
    def made(ranks: int, kind: str) -> dict[int, set[str]]:
        run = job(ranks, 1, kind)
        assert [rank.code for rank in run.generation(0)] == [0] * ranks
        return run.digests

    return made


def assert_struck(run: Job, ended: list[Ended], moment: str, step: int, rank: int, generation: int) -> int:
    """That rank was killed there, and no other one hangs or ends well. Returns the newest step that any completed."""
    assert run.of("killed", generation=generation, moment=moment, step=step, rank=rank), [each.err for each in ended]
    assert ended[rank].code == -9
    assert all(each.code for each in ended)
    return max((note["step"] for each in ended for note in each.notes if "step" in note), default=0)


def assert_goes_on(run: Job, ended: list[Ended], calm: dict[int, set[str]]) -> dict[str, Any]:
    """The training has ended, with the bits of the calm one in all steps. Returns the last note of rank 0."""
    assert [each.code for each in ended] == [0] * len(ended), "\n".join(each.err for each in ended)
    assert {step: run.digests[step] for step in run.digests} == {step: calm[step] for step in run.digests}
    assert STEPS in run.digests
    (began,) = {each.answer["began"] for each in ended}
    found: dict[str, Any] = ended[0].answer
    assert found["began"] == began
    return found


@pytest.mark.parametrize(
    ("words", "ranks", "nodes", "moment", "step", "rank"),
    [
        (DDP, 3, 1, "look", 6, 2),
        (DDP, 3, 1, "agreed", 6, 0),
        (COMPARED, 3, 1, "digests", 6, 1),
        (COMPARED, 2, 1, "digests", 6, 0),
        (FSDP2, 2, 1, "look", 6, 1),
        (FSDP2, 2, 1, "copied", 6, 0),
        (FSDP2, 2, 2, "copied", 6, 1),
        # Where each rank has a node of its own, these are of the snapshot after step 5.
        (DDP, 2, 2, "sending", 5, 1),
        (DDP, 2, 2, "received", 5, 0),
        (FSDP2, 2, 2, "sending", 5, 0),
        (FSDP2, 2, 2, "received", 5, 1),
    ],
)
def test_a_kill_inside_the_keepers_work_costs_no_step(
    job: Callable[..., Job],
    calm: Callable[..., dict[int, set[str]]],
    words: tuple[str, ...],
    ranks: int,
    nodes: int,
    moment: str,
    step: int,
    rank: int,
) -> None:
    run = job(ranks, nodes, *words)

    done = assert_struck(run, run.generation(0, f"{moment}-0-{step}-{rank}"), moment, step, rank, 0)
    last = assert_goes_on(run, run.generation(1), calm(ranks, words[0]))

    assert done >= step - 1
    # Each rank may have copied a step that none has seen complete.
    assert done <= last["began"] <= done + (words[0] == "fsdp2"), last["logged"]
    assert last["repeated"] == 0


@pytest.mark.parametrize(
    ("words", "moment", "rank"),
    [(DDP, "response", 0), (DDP, "inventory", 1), (FSDP2, "inventory", 1), (FSDP2, "part", 0)],
)
def test_a_kill_while_the_ranks_meet_and_restore_costs_no_step(
    job: Callable[..., Job],
    calm: Callable[..., dict[int, set[str]]],
    words: tuple[str, ...],
    moment: str,
    rank: int,
) -> None:
    run = job(2, 1, *words)

    done = assert_struck(run, run.generation(0, "forward-0-6-1"), "forward", 6, 1, 0)
    assert_struck(run, run.generation(1, f"{moment}-1-0-{rank}"), moment, 0, rank, 1)
    last = assert_goes_on(run, run.generation(2), calm(2, words[0]))

    assert (done, last["began"]) == (5, 5)
    # All that were killed are forgotten: nothing is counted twice.
    assert last["repeated"] == 0


@pytest.mark.parametrize("killed", [1, 2])
def test_a_kill_while_steps_are_given_up_brings_none_of_them_back(
    job: Callable[..., Job], calm: Callable[..., dict[int, set[str]]], killed: int
) -> None:
    run = job(3, 1, *COMPARED)

    # Compared after steps 3 and 6. Rank 1's weights change before step 5: the gradients of steps 5 and 6 are wrong.
    assert_struck(run, run.generation(0, "corrupt-0-5-1", f"forget-0-6-{killed}"), "forget", 6, killed, 0)
    for wrong in (5, 6):
        del run.digests[wrong]
    last = assert_goes_on(run, run.generation(1), calm(3, "ddp"))

    assert last["began"] == 3
