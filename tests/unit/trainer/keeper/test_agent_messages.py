"""A keeper's messages to its agent, which the test plays: whether it saves, and the step that a copy really has."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.trainer import link
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory import capacity, node_memory, slots
from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.state import Piece, Version
from tests.harness import DEADLINE_S, wait_for
from tests.unit.trainer.keeper.test_step_copies import Counting, Job
from tests.unit.trainer.test_link import linked, messages, send

pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture
def agent(memory: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of the link."""
    with linked(monkeypatch) as ours:
        yield ours


class Extra:
    """A state that calls `copied` when it is copied."""

    def __init__(self) -> None:
        self.copied: Callable[[], object] = lambda: None

    def state_dict(self) -> dict[str, int]:
        self.copied()
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("failed by the test")


class Training:
    """A training in this process alone, and its messages to its agent."""

    def __init__(self, agent: socket.socket) -> None:
        model = torch.nn.Linear(2, 1)
        self.extra, self.agent = Extra(), agent
        # The only snapshot is that after the first step.
        self.keeper = Keeper(model, torch.optim.SGD(model.parameters()), extra=self.extra, lose_at_most=1_000_000)
        self._sent: list[dict[str, object]] = []

    def train(
        self,
        begun: Callable[[], object] = nothing,
        completing: Callable[[], object] = nothing,
        done: Callable[[], object] = nothing,
    ) -> None:
        """Train until something ends the training. The callbacks are called in the third step."""
        with self.keeper:
            for step in self.keeper.steps(1_000_000):
                now = step == 3
                (begun if now else nothing)()
                with self.keeper.commit():
                    (completing if now else nothing)()
                (done if now else nothing)()

    @property
    def messages(self) -> list[object]:
        self._sent += [row for row in messages(self.agent) if row["event"] != "progress"]
        return [row["event"] for row in self._sent]

    def saved(self) -> object:
        """Wait for the message `saved`. Returns its step."""
        wait_for(lambda: "saved" in self.messages, "the response")
        return self._sent[-1]["step"]

    def lose_a_peer(self) -> None:
        send(self.agent, event="peer_failed", generation=0)


def test_at_a_stop_it_reports_that_it_saves_before_it_does(agent: socket.socket) -> None:
    training = Training(agent)
    before: list[list[object]] = []

    def stop() -> None:
        training.extra.copied = lambda: before.append(training.messages)
        send(agent, event="stop_at_step_boundary", reason="join")

    with pytest.raises(SystemExit):
        training.train(begun=stop)

    assert before[0] == ["listens", "mark", "mark", "stopped", "saving"]


def test_while_it_completes_a_step_after_a_failure_it_reports_that_it_saves(agent: socket.socket) -> None:
    training = Training(agent)
    sent: list[list[object]] = []
    steps: list[object] = []

    def lose_a_peer() -> None:
        training.lose_a_peer()
        wait_for(lambda: "saving" in training.messages, "the message")
        sent.append(training.messages)

    def end() -> None:
        steps.append(training.saved())
        fail()

    with pytest.raises(ValueError, match="failed by"):
        training.train(completing=lose_a_peer, done=end)

    assert sent == [["listens", "mark", "mark", "saving"]]
    assert steps == [3]


def test_a_state_that_cannot_be_saved_after_a_failure_makes_no_one_wait(
    agent: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(agent)
    steps: list[object] = []

    def refuse() -> None:
        raise RuntimeError("no state today")

    def lose_a_peer() -> None:
        training.extra.copied = refuse
        training.lose_a_peer()
        steps.append(training.saved())
        fail()

    # The program's own error must come out of the training.
    with pytest.raises(ValueError, match="failed by"):
        training.train(begun=lose_a_peer)

    assert steps == [0]
    assert "no state today" in capfd.readouterr().err


def trained(model: nn.Module, optimizer: Any, fails_in: int, **options: Any) -> list[int]:
    """Train until a peer fails in that step. Returns the step that the rank then reports as saved."""
    steps: list[int] = []
    with Keeper(model, optimizer, per_rank=(), log=lambda text: None, **options) as keeper:
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


def test_without_room_nothing_is_saved_and_no_message_is_sent(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "capacity_in", lambda folder: capacity.Capacity(0, "the file system"))

    model = nn.Linear(2, 2)

    assert trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 7) == [0]
    assert all(row["event"] != "saving" for row in messages(agent))


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
    with pytest.raises(RuntimeError, match="reset by peer"):
        job.train(11, fails_in=11)
    named = job.keeper._state.peer_failed(0)

    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    with Job(Counting).keeper as resumed:
        return named, resumed.step


@pytest.mark.usefixtures("group", "agent", "no_record_of_step_9")
def test_a_rank_reports_that_it_saves_and_waits_while_its_part_is_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish, has_reported = slots.finish, threading.Event()

    def finish_late(region: torch.Tensor, layout: bytes, piece: Piece, *rest: Any) -> Any:
        if threading.current_thread().name == "mirror" and piece.version == Version(0, 9):
            assert has_reported.wait(DEADLINE_S)
        return finish(region, layout, piece, *rest)

    monkeypatch.setattr(slots, "finish", finish_late)
    monkeypatch.setattr(link, "saving", lambda step: has_reported.set())

    assert named_and_resumed(monkeypatch) == (9, 9)
