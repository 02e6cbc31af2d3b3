"""A keeper's messages to its agent, which the test plays: a saving worker gets time, one that cannot save gets none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elaunch.trainer.keeper.keeper import Keeper
from tests.harness import wait_for
from tests.unit.trainer.test_link import linked, said, tell


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of the link."""
    monkeypatch.setenv("ELAUNCH_MEMORY", str(tmp_path))
    monkeypatch.setenv("ELAUNCH_GENERATION", "0")
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
    raise ValueError("asked for by the test")


class Training:
    """A training in this process alone, and its messages to its agent."""

    def __init__(self, agent: socket.socket) -> None:
        model = torch.nn.Linear(2, 1)
        self.extra, self.agent = Extra(), agent
        # The only snapshot is that after the first step.
        self.keeper = Keeper(model, torch.optim.SGD(model.parameters()), extra=self.extra, lose_at_most=1_000_000)
        self._said: list[dict[str, object]] = []

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
    def words(self) -> list[object]:
        self._said += [row for row in said(self.agent) if row["event"] != "progress"]
        return [row["event"] for row in self._said]

    def saved(self) -> object:
        """Wait for the message `saved`. Returns its step."""
        wait_for(lambda: "saved" in self.words, "the answer")
        return self._said[-1]["step"]

    def lose_a_peer(self) -> None:
        tell(self.agent, event="peer_failed", generation=0)


def test_at_a_stop_it_says_that_it_saves_before_it_does(agent: socket.socket) -> None:
    training = Training(agent)
    before: list[list[object]] = []

    def stop() -> None:
        training.extra.copied = lambda: before.append(training.words)
        tell(agent, event="stop_at_step_boundary", reason="join")

    with pytest.raises(SystemExit):
        training.train(begun=stop)

    assert before[0] == ["listens", "mark", "mark", "stopped", "saving"]


def test_while_it_completes_a_step_after_a_failure_it_says_that_it_saves(agent: socket.socket) -> None:
    training = Training(agent)
    words: list[list[object]] = []
    steps: list[object] = []

    def lose_a_peer() -> None:
        training.lose_a_peer()
        wait_for(lambda: "saving" in training.words, "the word")
        words.append(training.words)

    def end() -> None:
        steps.append(training.saved())
        fail()

    with pytest.raises(ValueError, match="asked for"):
        training.train(completing=lose_a_peer, done=end)

    assert words == [["listens", "mark", "mark", "saving"]]
    assert steps == [3]


def test_a_state_that_cannot_be_saved_after_a_failure_keeps_nobody_waiting(
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
    with pytest.raises(ValueError, match="asked for"):
        training.train(begun=lose_a_peer)

    assert steps == [0]
    assert "no state today" in capfd.readouterr().err
