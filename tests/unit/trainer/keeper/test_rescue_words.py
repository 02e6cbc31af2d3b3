"""What a rank says of its state after a peer's failure: the step that a copy in memory really has."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer import Keeper, link
from elaunch.trainer.memory import node_memory, room, slots
from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.state.version import Piece, Version
from tests.harness import DEADLINE_S
from tests.unit.trainer.keeper.test_keeper_words import said
from tests.unit.trainer.keeper.test_step_copies import Counting, Job


@pytest.fixture
def agent(memory: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The agent's end of a link, after a start on a node with a memory."""
    end, worker = socket.socketpair()
    monkeypatch.setenv("ELAUNCH_LINK", str(worker.detach()))
    link._open_link.cache_clear()
    return end


def trained(model: nn.Module, optimizer: Any, fails_in: int, **options: Any) -> list[int]:
    """Train until a peer fails in that step. Returns the step that the rank then says is saved."""
    steps: list[int] = []
    with Keeper(model, optimizer, per_rank=(), say=lambda text: None, **options) as keeper:
        for step in keeper.steps(fails_in):
            if step == fails_in:
                # As the link's thread does while this one waits for the dead peer.
                steps.append(keeper._state.peer_failed(0))
                keeper._state._is_sealed = False
            model(torch.ones(1, 2)).sum().backward()
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
    return steps


def plain(fails_in: int, **options: Any) -> list[int]:
    model = nn.Linear(2, 2)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), fails_in, **options)


def words(agent: socket.socket) -> list[object]:
    return [row["event"] for row in said(agent)]


def test_a_rank_that_saves_says_so_and_names_the_step(agent: socket.socket) -> None:
    assert plain(7, lose_at_most=100) == [6]
    assert "saving" in words(agent)


def test_without_room_nothing_is_saved_and_nobody_says_so(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "room_in", lambda folder: room.Room(0, "the file system"))

    assert plain(7) == [0]
    assert "saving" not in words(agent)


@pytest.mark.usefixtures("group", "agent")
@pytest.mark.parametrize(("lose_at_most", "step"), [(1, 5), (4, 2)])
def test_of_a_state_in_parts_the_step_of_the_last_copy_is_named(lose_at_most: int, step: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(2, 2))

    assert trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 6, lose_at_most=lose_at_most) == [step]


@pytest.fixture
def no_record_of_step_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for the random state of that step, so the training goes on while its snapshot is written."""
    keep = Records.keep

    def keep_but_9(self: Records, version: Version, *rest: Any) -> torch.Tensor:
        if version == Version(0, 9):
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(self, version, *rest)

    monkeypatch.setattr(Records, "keep", keep_but_9)


def named_and_resumed(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The step that a rank of a state in parts names after a failure in step 11, and the one of the next start."""
    # Its optimizer lets it have snapshots only: of steps 1, 5 and 9.
    job = Job(Counting, lose_at_most=4)
    with pytest.raises(RuntimeError, match="asked for by the test"):
        job.train(11, fails_in=11)
    named = job.keeper._state.peer_failed(0)

    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    with Job(Counting).keeper as resumed:
        return named, resumed.step


@pytest.mark.usefixtures("group", "agent", "no_record_of_step_9")
def test_a_rank_says_that_it_saves_and_waits_while_its_part_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, has_said = slots.finish, threading.Event()

    def finish_late(region: torch.Tensor, layout: bytes, piece: Piece, *rest: Any) -> Any:
        if threading.current_thread().name == "mirror" and piece.version == Version(0, 9):
            assert has_said.wait(DEADLINE_S)
        return finish(region, layout, piece, *rest)

    monkeypatch.setattr(slots, "finish", finish_late)
    monkeypatch.setattr(link, "saving", lambda step: has_said.set())

    assert named_and_resumed(monkeypatch) == (9, 9)
