"""Stamps: workers and agent note the time when they reach a stage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The stamps of scripts/train.py, in order; "context" on a GPU only. "training" follows after a few more steps.
WORKER_STAGES = ("script", "torch", "context", "group", "all_reduce", "step")

# (name in the tables, the event, which of several times counts)
_RESTART = (
    ("detected", "exited", min),
    ("others notified", "stopping", min),
    ("all stopped", "stopped", max),
    ("cleared", "cleared", max),
)
_BIRTH = (
    ("sealed", "sealed", max),
    ("last fork", "forked", max),
)
_WORKER_NAMES = {
    "script": "script's first line",
    "torch": "torch imported",
    "context": "CUDA context",
    "group": "group ready",
    "all_reduce": "first all-reduce",
    "step": "first optimizer step",
}


@dataclass(frozen=True)
class Stamp:
    """`event` happened in `rank`'s process `pid` at `monotonic_s`. `rank` is -1 in the agent's own stamps.

    `step` is -1 if the event belongs to no optimizer step.
    """

    generation: int
    event: str
    monotonic_s: float
    rank: int = -1
    pid: int = -1
    step: int = -1


def parse(text: str) -> list[Stamp]:
    """The stamps in JSON lines. A last line without its end is still being written. It is left out."""
    stamps = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            fields = json.loads(line)
            stamp = Stamp(
                int(fields["generation"]),
                str(fields["event"]),
                float(fields["monotonic_s"]),
                int(fields.get("rank", -1)),
                int(fields.get("pid", -1)),
                int(fields.get("step", -1)),
            )
            stamps.append(stamp)
    return stamps


def at(stamps: Iterable[Stamp], generation: int, event: str) -> dict[int, Stamp]:
    """The first stamp of an event in a generation, by rank."""
    found: dict[int, Stamp] = {}
    for stamp in stamps:
        if (stamp.generation, stamp.event) == (generation, event):
            found.setdefault(stamp.rank, stamp)
    return found


def all_at_s(stamps: Iterable[Stamp], generation: int, event: str, workers: int) -> float | None:
    """When the last of all ranks stamped an event, or None while a rank is missing."""
    found = at(stamps, generation, event)
    return max(stamp.monotonic_s for stamp in found.values()) if len(found) == workers else None


def again(stamps: Sequence[Stamp], since_s: float, ranks: int) -> list[Stamp] | None:
    """The stamps of the processes that began to train after `since_s`, one for each rank; None while one is missing.

    The generation's number does not help here: each of torchrun's nodes counts for itself.
    """
    newest: dict[int, Stamp] = {}
    for stamp in stamps:
        if stamp.event == "training" and stamp.monotonic_s > since_s:
            newest[stamp.rank] = stamp
    pids = {stamp.pid for stamp in newest.values()}
    return [stamp for stamp in stamps if stamp.pid in pids] if len(newest) == ranks else None


def last_s(stamps: Iterable[Stamp], event: str) -> float:
    """When the last process stamped an event. Raises ValueError if no process did."""
    return max(stamp.monotonic_s for stamp in stamps if stamp.event == event)


def restart_stages(
    agent: Sequence[Stamp], workers: Sequence[Stamp], generation: int, count: int, since_s: float
) -> dict[str, float]:
    """Seconds from the kill at `since_s` to each stage of `generation`, which the kill opened.

    Stages that the agent did not stamp are left out. The first worker's exit is the detection. The exits of the other
    workers are part of the stop.
    """
    stages = {}
    for name, event, first_or_last in _RESTART:
        times_s = [s.monotonic_s for s in agent if (s.generation, s.event) == (generation - 1, event)]
        times_s = [at_s for at_s in times_s if at_s >= since_s]
        if times_s:
            stages[name] = first_or_last(times_s) - since_s
    return {**stages, **birth_stages(agent, workers, generation, count, since_s)}


def start_stages(agent: Sequence[Stamp], workers: Sequence[Stamp], count: int, since_s: float) -> dict[str, float]:
    """Seconds from the command at `since_s` to each stage of generation 0."""
    stages = {}
    for name, event in (("agent's loop runs", "started"), ("fork server ready", "fork_server_ready")):
        times_s = [s.monotonic_s for s in agent if s.event == event]
        if times_s:
            stages[name] = times_s[0] - since_s
    return {**stages, **birth_stages(agent, workers, 0, count, since_s)}


def birth_stages(
    agent: Sequence[Stamp], workers: Sequence[Stamp], generation: int, count: int, since_s: float
) -> dict[str, float]:
    """Seconds from `since_s` to each stage between a generation's table and its last rank's first optimizer step."""
    stages = {}
    for name, event, first_or_last in _BIRTH:
        times_s = [s.monotonic_s for s in agent if (s.generation, s.event) == (generation, event)]
        if times_s:
            stages[name] = first_or_last(times_s) - since_s
    for event in WORKER_STAGES:
        at_s = all_at_s(workers, generation, event, count)
        if at_s is not None:
            stages[_WORKER_NAMES[event]] = at_s - since_s
    return stages
