"""Checkpoints of real groups: killed in the middle, on a full disk, corrupted, stale, at another world size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elaunch.trainer.checkpoint.storage import Mark, marks
from tests.ranks import Ended, RankForker, Ranks
from tests.s3 import S3, s3_server

SCRIPT = Path(__file__).with_name("shards.py")


@pytest.fixture(scope="module", name="s3")
def _s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


class Group:
    """Groups of ranks one after the other, on the checkpoints in one folder, or below one URL of `s3`."""

    def __init__(self, forker: RankForker, folder: Path, s3: S3 | None = None, place: str = "") -> None:
        self.forker, self.folder, self.s3, self.place = forker, folder, s3, place
        self.checkpoints = folder / "checkpoints" / place
        self.prefix = f"{folder.name}/{place}" if place else folder.name
        self.url = f"s3://bucket/{self.prefix}"
        self.env = (
            {**s3.env, "CHECKPOINTS": self.url} if s3 else {"CHECKPOINTS": str(self.checkpoints)} if place else {}
        )

    def within(self, place: str) -> Group:
        """The same group, with the checkpoints in that folder below the first one."""
        return Group(self.forker, self.folder, self.s3, place)

    def begin(self, world_size: int, kind: str, *actions: str, generation: int = 0) -> Ranks:
        env = {"FOLDER": str(self.folder), "ELAUNCH_GENERATION": str(generation), **self.env}
        return Ranks(self.forker, world_size, SCRIPT, kind, *actions, env=env)

    def run(self, world_size: int, kind: str, *actions: str, generation: int = 0) -> list[Any]:
        """Run a group. Returns the ranks' answers, which must have the same digests."""
        with self.begin(world_size, kind, *actions, generation=generation) as ranks:
            answers = ranks.answers()
        assert len({(a["digest"], *(note["digest"] for note in a["notes"])) for a in answers}) == 1
        return answers

    def struck(self, world_size: int, kind: str, victim: int, *actions: str) -> Ended:
        """A run in which one rank kills itself. The test kills the others after it."""
        with self.begin(world_size, kind, *actions) as ranks:
            ended = ranks.end_of(victim)
        assert ended.code == -9, ended.err
        return ended

    @property
    def marks(self) -> list[Mark]:
        return marks(self.url if self.s3 else self.checkpoints)

    @property
    def hidden(self) -> list[str]:
        """The checkpoints that were begun and not published."""
        if self.s3:
            keys = self.s3.keys(f"{self.prefix}/")
            begun = {key.rpartition("/")[0] for key in keys}
            return [folder for folder in begun if f"{folder}/manifest.json" not in keys]
        return [path.name for path in self.checkpoints.iterdir() if not (path / "manifest.json").exists()]


@pytest.fixture(scope="module")
def saved(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Group, Any]]:
    """The checkpoint and answers of four ranks of a kind after three steps. Saved once for all tests that load it."""

    @functools.cache
    def save(kind: str) -> tuple[Group, Any]:
        group = Group(forker, tmp_path_factory.mktemp(kind))
        return group, group.run(4, kind, "train", "3", "save")[0]

    return save


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero"])
def test_what_four_ranks_saved_is_loaded_by_three_and_one(saved: Callable[[str], tuple[Group, Any]], kind: str) -> None:
    group, answer = saved(kind)

    for world_size in (3, 1):
        loaded = group.run(world_size, kind, "load", generation=1)[0]

        assert (loaded["loaded"], loaded["step"]) == ([0, 3], 3)
        assert loaded["digest"] == answer["digest"]
        assert loaded["logged"] == []


@pytest.mark.parametrize(("kind", "other"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_the_weights_of_a_sharded_model_are_loaded_by_one_that_is_not_and_the_other_way_round(
    saved: Callable[[str], tuple[Group, Any]], kind: str, other: str
) -> None:
    group, answer = saved(kind)

    loaded = group.run(3, other, "weights", generation=1)[0]

    assert loaded["loaded"] == [0, 3]
    assert loaded["digest"] == answer["weights"]


# The victim, and the moment at which it is killed.
DEATHS = {
    ("folder", "ddp"): [(0, "write"), (0, "publish")],
    # A step of FSDP2 takes each rank much longer.
    ("folder", "zero"): [(1, "write"), (1, "part")],
    ("s3", "ddp"): [(0, "publish")],
}


@dataclass(frozen=True)
class Death:
    """The files after the death, and what the next start found and left. `whole` is the digest of the saved state."""

    whole: str
    marks: list[Mark]
    hidden: list[str]
    found: Any
    left: list[str]


Deaths = dict[tuple[int, str], Death]


@pytest.fixture(scope="module")
def deaths(
    request: pytest.FixtureRequest, forker: RankForker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Deaths]]:
    """A rank is killed at each of these moments, each time with other checkpoints. One group loads them all later."""
    with pytest.MonkeyPatch.context() as patched:

        @functools.cache
        def strike(store: str, kind: str) -> Deaths:
            s3: S3 | None = request.getfixturevalue("s3") if store == "s3" else None
            for name, value in (s3.env if s3 else {}).items():
                patched.setenv(name, value)
            group = Group(forker, tmp_path_factory.mktemp(f"{store}-{kind}"), s3)
            planned = DEATHS[store, kind]
            # One rank less is a client of the object store less: DDP's second rank would only wait.
            size = 1 if (store, kind) == ("s3", "ddp") else 2
            places = {death: group.within("-".join(map(str, death))) for death in planned}
            actions = [word for place in places.values() for word in ("in", place.place, "save")]
            whole = group.run(size, kind, "train", "2", *actions)[0]["digest"]

            for (victim, moment), place in places.items():
                place.struck(size, kind, victim, "load", "train", "1", "die", moment, str(victim), "save")

            there = {death: (place.marks, place.hidden) for death, place in places.items()}
            # A step between two loads changes the state, so that the first load does not count for the second.
            actions = [word for p in places.values() for word in ("in", p.place, "load", "note", "train", "1")]
            notes = group.run(size, kind, *actions, generation=1)[0]["notes"]
            return {
                death: Death(whole, *there[death], note, place.hidden)
                for (death, place), note in zip(places.items(), notes, strict=True)
            }

        yield strike


@pytest.mark.parametrize(
    ("store", "kind", "victim", "moment"),
    [(store, kind, *death) for (store, kind), planned in DEATHS.items() for death in planned],
)
def test_a_rank_killed_while_a_checkpoint_is_made_leaves_the_one_before(
    deaths: Callable[[str, str], Deaths], store: str, kind: str, victim: int, moment: str
) -> None:
    death = deaths(store, kind)[victim, moment]

    assert death.marks == [Mark(0, 2)]
    # If rank 0 lives, it hears of the death, and deletes what was written if it lives long enough.
    assert len(death.hidden) == 1 if victim == 0 else len(death.hidden) <= 1
    assert (death.found["loaded"], death.found["digest"]) == ([0, 2], death.whole)
    assert ["removed " in each for each in death.found["logged"]] == [True] * len(death.hidden)
    assert death.left == []
