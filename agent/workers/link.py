"""The agent's end of a worker's link: the messages from the worker, and the messages to it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from elaunch.agent.core.actions import Message, PeerFailed, ShowStacks, StopAtStepBoundary
from elaunch.agent.core.events import LinkEvent, WorkerEnded, WorkerListens, WorkerSaved, WorkerSaving, WorkerStopped
from elaunch.agent.diagnosis.exit_status import Raised, is_peer_lost
from elaunch.agent.diagnosis.samplers import FlightRecorder
from elaunch.strict_json import parse_json

# A step's time is a mean over this many samples at which the step had moved: ten seconds, or ten slow steps.
_MOVES = 10


class StepTimes:
    """When one worker's step moved, and when it last reported."""

    def __init__(self) -> None:
        self._moves: deque[tuple[float, int]] = deque(maxlen=_MOVES + 1)
        self._reports = 0
        self.reported_s: float | None = None

    def sample(self, now_s: float, step: int, reports: int) -> None:
        """Note the worker's newest step (-1 for none), and how many reports it has sent."""
        if reports == self._reports:
            return
        self._reports, self.reported_s = reports, now_s
        if step < 0 or (self._moves and self._moves[-1][1] == step):
            return
        if self._moves and step < self._moves[-1][1]:
            # It repeats these steps.
            self._moves.clear()
        self._moves.append((now_s, step))

    @property
    def step_s(self) -> float | None:
        """Seconds per step, None before the second move."""
        if len(self._moves) < 2:
            return None
        (from_s, first), (to_s, last) = self._moves[0], self._moves[-1]
        return (to_s - from_s) / (last - first)


_LINK_BYTES_MAX = 1 << 16
# The most characters of a note, which goes to the log, and of a phase's name, which goes into a failure's message.
_TEXT_MAX, _NAME_MAX = 2000, 100
_STEP_END = 1 << 63
_STAGES: Mapping[str, Callable[[int, int, int], LinkEvent]] = {
    "saving": WorkerSaving,
    "saved": WorkerSaved,
    "stopped": WorkerStopped,
}
# A program that runs on for longer after losing a peer does not exit because of it.
_LOST_S = 10.0
_FDS_MAX = 4


class StartMark(NamedTuple):
    """A point that a worker's start has reached, and when, on the host's monotonic clock."""

    name: str
    at_s: float


@dataclass
class Link:
    """The agent's end of one worker's link.

    `step` is the newest step that the worker reported, `first_step` the first, `total` the last one of its training (0
    if unknown), and `phase` the newest phase. `reports` counts the reports of both; `step_times` is sampled from them.
    `raised`: its program ended with an exception. `reached_store`: whether it had made its process group; None until
    the program has ended. `has_had_group`: it has made one. `left_s` is when it left its newest process group, `lost`
    the error that reported a lost peer of that group, at `lost_s`, and `ended_s` when its program ended (0 if that is
    not known). `refused` is why it refused to run, if it did. `messages` are events for the agent's core, texts for the
    log and marks for the timeline. `recorder` polls the worker's collectives, while it has a process group.
    """

    generation: int
    local_rank: int
    socket: socket.socket
    step: int = -1
    first_step: int = -1
    total: int = 0
    phase: str = ""
    reports: int = 0
    step_times: StepTimes = field(default_factory=StepTimes)
    raised: bool = False
    reached_store: bool | None = None
    has_had_group: bool = False
    left_s: float = 0.0
    lost: Raised | None = None
    lost_s: float = 0.0
    ended_s: float = 0.0
    refused: str = ""
    messages: list[LinkEvent | str | StartMark] = field(default_factory=list)
    rest: bytes = b""
    recorder: FlightRecorder | None = None

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_returned(self) -> bool:
        """Whether the program has ended without an exception."""
        return self.reached_store is not None and not self.raised

    @property
    def progressed(self) -> bool | None:
        """Whether it has reported a step, or had made its process group; None while that is not known."""
        return True if self.step >= 0 or self.has_had_group else self.reached_store

    @property
    def lost_at_end(self) -> Raised | None:
        """The error that reported a lost peer, if the program ended soon after it."""
        return self.lost if (self.ended_s or time.monotonic()) - self.lost_s <= _LOST_S else None

    def read(self) -> bool:
        """Read what has arrived, and drop lines that are not messages. Returns whether the link is still open."""
        left = _LINK_BYTES_MAX
        while left > 0:
            try:
                # The kernel ends a read where a descriptor comes: what was sent later needs another call.
                data, fds, *_ = socket.recv_fds(self.socket, left, _FDS_MAX, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            left -= len(data)
            self._take_fds(fds)
            *lines, self.rest = (self.rest + data).split(b"\n")
            self.rest = self.rest[-_LINK_BYTES_MAX:]
            for line in lines:
                with suppress(ValueError):
                    self._take(parse_json(line))
        return True

    def send(self, message: Message) -> None:
        """Send the message, if the worker is there and reads."""
        with suppress(OSError):
            self.socket.send(line_of(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _take(self, message: object) -> None:
        where = (self.generation, self.local_rank)
        if not isinstance(message, dict) or not all(_is_step(message.get(name, 0)) for name in ("step", "total")):
            return
        match message:
            case {"event": "progress", "step": int(step)}:
                self.step, self.reports, self.total = step, self.reports + 1, message.get("total", self.total)
                if self.first_step < 0:
                    self.first_step = step
                    if isinstance(at_s := message.get("monotonic_s"), float):
                        self._mark("stepped", at_s)
            case {"event": "phase", "name": str(name)}:
                self.phase, self.reports = _plain(name), self.reports + 1
            case {"event": "mark", "name": str(name), "monotonic_s": float(at_s)}:
                self._mark(_plain(name), at_s)
            case {"event": "listens", "stop": bool(stop), "peer_failed": bool(peer_failed)}:
                self.messages.append(WorkerListens(*where, to_stop=stop, to_failure=peer_failed))
            case {"event": ("saving" | "saved" | "stopped") as stage, "step": int(step)}:
                self.messages.append(_STAGES[stage](*where, step))
            case {"event": "error", "call": str(call), "exception": str(exception), "message": str(text)}:
                if is_peer_lost(exception, text):
                    self.lost = Raised(exception, _plain(text), "", "", call=_plain(call)[:_NAME_MAX])
                    at_s = message.get("monotonic_s")
                    self.lost_s = at_s if isinstance(at_s, float) else time.monotonic()
            case {"event": "refused", "reason": str(reason)}:
                self.refused = _plain(reason)
            case {"event": "note", "text": str(text)}:
                self.messages.append(_plain(text))
            case {"event": "left", "monotonic_s": float(at_s)}:
                self.left_s = at_s
            case {"event": "ended", "raised": bool(raised), "reached_store": bool(reached_store)}:
                if self.reached_store is None:
                    ended_s = message.get("monotonic_s")
                    self.ended_s = ended_s if isinstance(ended_s, float) else time.monotonic()
                    over_s = self.left_s or self.ended_s
                    self.messages.append(WorkerEnded(*where, over_s, raised))
                self.raised, self.reached_store = raised, reached_store

    def _take_fds(self, fds: list[int]) -> None:
        """Take the newest descriptor as the recorder's socket: only elaunch's own code in the worker sends any."""
        for fd in fds:
            self.forget_recorder()
            self.left_s, self.lost, self.has_had_group = 0.0, None, True
            try:
                self.recorder = FlightRecorder(fd)
            except OSError:
                os.close(fd)

    def forget_recorder(self) -> None:
        if self.recorder:
            self.recorder.close()
            self.recorder = None

    def _mark(self, name: str, at_s: float) -> None:
        self.messages.append(StartMark(name, min(at_s, time.monotonic())))


def _is_step(value: object) -> bool:
    """Whether it is a step's number, or -1 for none. In Python True is an int, and a huge int cannot be printed."""
    return type(value) is int and -1 <= value < _STEP_END


def _plain(text: str) -> str:
    """A worker's text for the log and for the store, cut, and without lone surrogates, which UTF-8 cannot encode."""
    return text[:_TEXT_MAX].encode(errors="backslashreplace").decode()


def line_of(message: Message) -> bytes:
    """The message as one line of JSON, as the link carries it."""
    match message:
        case StopAtStepBoundary(reason):
            record: dict[str, object] = {"event": "stop_at_step_boundary", "reason": reason.value}
        case PeerFailed(generation):
            record = {"event": "peer_failed", "generation": generation}
        case ShowStacks():
            record = {"event": "stacks"}
    return json.dumps(record).encode() + b"\n"
