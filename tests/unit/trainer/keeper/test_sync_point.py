"""What a rank asks for at a look, and what brings the next look near. The other ranks' answers are the test's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.trainer.keeper.boundary import SyncPlan, SyncPoint
from elaunch.trainer.state.region import Version


class Rank:
    """One rank's looks. `wants` has what it asked for; the others let the next look be `far` steps later."""

    def __init__(
        self,
        *,
        step: int = 0,
        on_disk: int = 0,
        far: int = 50,
        snapshot_every: int | None = None,
        is_strict: bool = False,
        **options: Any,
    ) -> None:
        self.wants: list[SyncPlan] = []
        self.far, self.may_be_copied, self.next_copy = far, True, None
        # Steps between two copies that are as good as a snapshot; None without any.
        self.copied_every = 1 if snapshot_every is None else None
        self.snapshots: list[int] = []
        self.checkpoints: list[int] = []
        self.state = SimpleNamespace(
            version=Version(0, step),
            has_failed_copy=False,
            copies_next=False,
            copies_each=False,
            may_be_copied=lambda: self.may_be_copied,
            snapshot=self.snapshot,
            require_checked=lambda: None,
        )
        self.copies = copies = SimpleNamespace(
            copied_step=0,
            paces=True,
            snapshot_every=snapshot_every,
            copies_parts=False,
            disk=SimpleNamespace(look=lambda: None, found=on_disk),
            checkpoint=lambda version: self.checkpoints.append(version.step),
            steps=SimpleNamespace(
                is_off=is_strict, wants=lambda step: True, every=1, look_after=lambda step: self.next_copy
            ),
        )
        verification = SimpleNamespace(wants_snapshot=lambda state, wants: wants and not is_strict)
        boundary = SimpleNamespace(agreed=self.agreed)
        self.around = SyncPoint(
            *(boundary, self.state, copies, verification),  # type: ignore[arg-type]
            **{"checkpoint_every": 1000, "verify_every": None, **options},
        )

    def agreed(self, wants: SyncPlan) -> SyncPlan:
        self.wants.append(wants)
        return replace(wants, steps=min(self.far, wants.steps))

    def snapshot(self) -> None:
        self.snapshots.append(self.state.version.step)

    def at(self, step: int) -> bool:
        """Whether there is a look after that step. If so, it is made."""
        self.state.version = Version(0, step)
        self.copies.copied_step = step // self.copied_every * self.copied_every if self.copied_every else 0
        is_now = self.around.is_now()
        if is_now:
            self.around.look()
        return is_now


def looks_of(rank: Rank, steps: range) -> list[int]:
    return [step for step in steps if rank.at(step)]


def test_copies_of_each_step_need_no_look_each_but_a_failed_one_has_a_look_at_once() -> None:
    rank = Rank()
    assert looks_of(rank, range(5)) == [0, 1, 3]
    assert rank.state.copies_each

    rank.state.has_failed_copy = True

    assert rank.at(5)
    assert not rank.state.has_failed_copy
    assert not rank.at(6)


def test_ranks_whose_loops_have_different_lengths_are_refused_at_a_look() -> None:
    ranks = [SyncPlan(total=total).numbers(0) for total in (20, 25, 25)]

    with pytest.raises(ValueError, match=r"different numbers of steps: 20 on one and 25 on another.*drop_last=True"):
        SyncPlan.agreed([max(numbers) for numbers in zip(*ranks, strict=True)])


def test_snapshots_at_a_given_distance_are_made_after_these_steps() -> None:
    rank = Rank(snapshot_every=7)

    looks = looks_of(rank, range(31))

    assert rank.snapshots == [1, 8, 15, 22, 29]
    assert len(looks) < 20


def test_a_snapshot_that_is_refused_is_tried_again_after_the_next_step() -> None:
    rank = Rank(snapshot_every=20)
    looks_of(rank, range(21))
    rank.may_be_copied = False

    assert looks_of(rank, range(21, 24)) == [21, 22, 23]
    rank.may_be_copied = True
    assert rank.at(24)
    assert rank.snapshots == [1, 24]


def test_a_copy_that_is_due_has_a_look_before_its_step() -> None:
    rank = Rank()
    looks_of(rank, range(8))
    rank.next_copy = 20  # type: ignore[assignment]

    assert looks_of(rank, range(8, 21))[-2:] == [15, 20]


def test_checkpoints_are_written_after_their_multiples() -> None:
    rank = Rank(checkpoint_every=16)

    looks_of(rank, range(50))

    assert rank.checkpoints == [16, 32, 48]


@pytest.mark.parametrize(("on_disk", "written"), [(0, [17, 32]), (16, [32])], ids=["lost", "whole"])
def test_a_checkpoint_that_a_failure_has_torn_is_written_at_the_first_look_after_it(
    on_disk: int, written: list[int]
) -> None:
    rank = Rank(step=17, on_disk=on_disk, checkpoint_every=16)

    looks_of(rank, range(17, 40))

    assert rank.checkpoints == written
