"""Signals that request a stop, what a rank proposes at a sync point, and what brings the next one near."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.trainer.keeper.boundary import StopRequest, SyncPlan, SyncPoint
from elaunch.trainer.state import Version
from tests.harness import RUN_LIMIT_S


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("handled")
def test_the_first_signal_is_noted_its_echo_too_and_a_later_one_ends_the_process(signum: signal.Signals) -> None:
    ended: list[int] = []
    now_s = 100.0
    with contextlib.suppress(SystemExit), StopRequest(clock_s=lambda: now_s, end=ended.append) as request:
        os.kill(os.getpid(), signum)
        noted = request.signum
        now_s += 0.9
        os.kill(os.getpid(), signal.SIGTERM)
        echoed = list(ended)
        now_s += 0.2
        os.kill(os.getpid(), signum)
        raise SystemExit

    assert noted == signum
    assert request.signum == signum
    assert echoed == []
    assert ended == [signum]


RAISES = """
import signal
from elaunch.trainer.keeper.boundary import StopRequest
with StopRequest():
    signal.raise_signal(signal.SIGTERM)
    raise ValueError("failed by the test")
"""


def test_a_signal_without_a_handler_does_not_hide_an_exception() -> None:
    ended = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=RUN_LIMIT_S)

    assert ended.returncode == 1
    assert "ValueError: failed by the test" in ended.stderr


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_signal_that_was_noted_and_not_obeyed_is_the_programs_afterwards(
    error: type[Exception] | None, handled: list[int]
) -> None:
    with contextlib.suppress(ValueError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        assert handled == []
        if error:
            raise error

    assert handled == [signal.SIGTERM]


def test_a_request_that_is_left_before_a_later_one_does_not_take_its_signals_away(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first, second = StopRequest(), StopRequest()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    signal.raise_signal(signal.SIGTERM)
    noted = second.signum
    second.__exit__(SystemExit, SystemExit(), None)

    assert (noted, handled) == (signal.SIGTERM, [])
    assert signal.getsignal(signal.SIGTERM) is before


class Rank:
    """One rank's sync points. The others let the next one be 50 steps later."""

    def __init__(
        self,
        *,
        step: int = 0,
        on_disk: int = 0,
        snapshot_every: int | None = None,
        **options: Any,
    ) -> None:
        self.may_be_copied, self.next_copy = True, None
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
            disk=SimpleNamespace(report_failures=lambda: None, found=on_disk),
            checkpoint=lambda version: self.checkpoints.append(version.step),
            steps=SimpleNamespace(
                is_off=False, is_ready=lambda step: True, every=1, sync_after=lambda step: self.next_copy
            ),
        )
        verification = SimpleNamespace(due_snapshot=lambda state, is_due: is_due)
        boundary = SimpleNamespace(agreed=lambda own: replace(own, steps=min(50, own.steps)))
        self.sync = SyncPoint(
            *(boundary, self.state, copies, verification),  # type: ignore[arg-type]
            **{"checkpoint_every": 1000, "verify_every": None, **options},
        )

    def snapshot(self) -> None:
        self.snapshots.append(self.state.version.step)

    def at(self, step: int) -> bool:
        """Whether there is a sync point after that step. If so, it is made."""
        self.state.version = Version(0, step)
        self.copies.copied_step = step // self.copied_every * self.copied_every if self.copied_every else 0
        is_now = self.sync.is_now()
        if is_now:
            self.sync.run()
        return is_now


def sync_points_of(rank: Rank, steps: range) -> list[int]:
    return [step for step in steps if rank.at(step)]


def test_copies_of_each_step_need_no_sync_point_each_but_a_failed_one_has_one_immediately() -> None:
    rank = Rank()
    assert sync_points_of(rank, range(5)) == [0, 1, 3]
    assert rank.state.copies_each

    rank.state.has_failed_copy = True

    assert rank.at(5)
    assert not rank.state.has_failed_copy
    assert not rank.at(6)


def test_ranks_whose_loops_have_different_lengths_are_refused_at_a_sync_point() -> None:
    ranks = [SyncPlan(total=total).numbers(0) for total in (20, 25, 25)]

    with pytest.raises(ValueError, match=r"different numbers of steps: 20 on one and 25 on another.*drop_last=True"):
        SyncPlan.agreed([max(numbers) for numbers in zip(*ranks, strict=True)])


def test_snapshots_at_a_given_distance_are_made_after_these_steps() -> None:
    rank = Rank(snapshot_every=7)

    synced = sync_points_of(rank, range(31))

    assert rank.snapshots == [1, 8, 15, 22, 29]
    assert len(synced) < 20


def test_a_snapshot_that_is_refused_is_tried_again_after_the_next_step() -> None:
    rank = Rank(snapshot_every=20)
    sync_points_of(rank, range(21))
    rank.may_be_copied = False

    assert sync_points_of(rank, range(21, 24)) == [21, 22, 23]
    rank.may_be_copied = True
    assert rank.at(24)
    assert rank.snapshots == [1, 24]


def test_a_copy_that_is_due_has_a_sync_point_before_its_step() -> None:
    rank = Rank()
    sync_points_of(rank, range(8))
    rank.next_copy = 20  # type: ignore[assignment]

    assert sync_points_of(rank, range(8, 21))[-2:] == [15, 20]


@pytest.mark.parametrize(("on_disk", "written"), [(0, [17, 32, 48]), (16, [32, 48])], ids=["lost", "whole"])
def test_a_checkpoint_that_a_failure_has_torn_is_written_at_the_first_sync_point_after_it(
    on_disk: int, written: list[int]
) -> None:
    rank = Rank(step=17, on_disk=on_disk, checkpoint_every=16)

    sync_points_of(rank, range(17, 50))

    assert rank.checkpoints == written
