"""Plans what is measured, in which order. Contenders take turns, so that a slow minute affects all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from bench import launches, nodes, scale, state, steady
from bench.job import ELAUNCH, LIMIT_PRELOAD, LIMIT_TORCH, TORCHRUN, TORCHRUN_FORK, Contender
from bench.samples import Sample
from bench.state import KEPT, SIDES, Side

ONE_NODE_SECTIONS = ("start", "restart", "steady", "first-line")
NODES_SECTIONS = ("nodes-restart", "nodes-loss", "scale")
STATE_SECTIONS = ("state-restart", "state-cost")
SECTIONS = (*ONE_NODE_SECTIONS, *NODES_SECTIONS, *STATE_SECTIONS)
# Restarts of one job before the next contender's turn. There are several, since a job's start costs more.
RESTARTS_PER_JOB = 5
# A round of many agents counts as this many samples of the other kinds.
SAMPLES_PER_ROUND = 4
# The same for a turn of steps with a gigabyte.
SAMPLES_PER_WINDOW = 4


_Restart = Callable[[Contender, int, int, float, random.Random], Iterator[Sample]]


@dataclass(frozen=True)
class Settings:
    """The command line. `samples` is the number of samples of each kind."""

    samples: int
    workers: tuple[int, ...]
    agents: tuple[int, ...]
    contenders: tuple[Contender, ...]
    sections: tuple[str, ...]
    limit_s: float
    seed: int


@dataclass(frozen=True)
class Task:
    """One turn, of `key`."""

    round: str
    key: str
    run: Callable[[], Iterable[Sample]]


def plan(settings: Settings) -> list[Task]:
    """All turns of the sections of the command line."""
    makers = {
        "start": _starts,
        "restart": _restarts,
        "steady": _steady,
        "first-line": _first_lines,
        "nodes-restart": _nodes_restarts,
        "nodes-loss": _losses,
        "scale": _scale,
        "state-restart": _state_restarts,
        "state-cost": _state_costs,
    }
    return [task for section in SECTIONS if section in settings.sections for task in makers[section](settings)]


def chunks(samples: int, size: int) -> list[int]:
    """`samples` in parts of `size`. The last part may be smaller."""
    return [min(size, samples - done) for done in range(0, samples, size)]


def _starts(settings: Settings) -> Iterator[Task]:
    for turn in range(settings.samples):
        label = f"start, round {turn + 1} of {settings.samples}"
        for limit in (LIMIT_TORCH, LIMIT_PRELOAD):
            yield Task(label, limit, lambda name=limit: [launches.bare_import(name)])  # type: ignore[misc]
        for workers in settings.workers:
            for contender in settings.contenders:

                def run(contender: Contender = contender, workers: int = workers) -> list[Sample]:
                    return [launches.start(contender, workers)]

                yield Task(label, f"start, {contender.name}, {workers}", run)


def _restarts(settings: Settings) -> Iterator[Task]:
    return _killed("restart", settings, settings.contenders, settings.workers, launches.restarts)


def _nodes_restarts(settings: Settings) -> Iterator[Task]:
    contenders = _only(settings, ELAUNCH, TORCHRUN, TORCHRUN_FORK)
    return _killed(nodes.SECTION, settings, contenders, (nodes.RANKS,), nodes.restarts)


def _killed(
    label: str, settings: Settings, contenders: tuple[Contender, ...], counts: tuple[int, ...], restart: _Restart
) -> Iterator[Task]:
    # One random source for all turns, so the seed decides all ranks and delays of the run.
    rng = random.Random(settings.seed)
    failed: Counter[tuple[str, int]] = Counter()

    def turn(contender: Contender, workers: int, count: int) -> Iterator[Sample]:
        """One job. A contender that failed too often takes no turn."""
        if failed[contender.name, workers] < launches.FAILURES_MAX:
            for sample in restart(contender, workers, count, settings.limit_s, rng):
                failed[contender.name, workers] += bool(sample.why)
                yield sample

    parts = chunks(settings.samples, RESTARTS_PER_JOB)
    for number, count in enumerate(parts, 1):
        for workers in counts:
            # Without a store for each generation torchrun's workers may never meet again.
            for contender in (each if each.ours else each.with_fresh_store() for each in contenders):
                key = f"{label}, {contender.name}, {workers}"
                yield Task(f"round {number} of {len(parts)}", key, partial(turn, contender, workers, count))


def _losses(settings: Settings) -> Iterator[Task]:
    # A launcher that never notices a loss takes the whole time limit each time. A few samples show that.
    rng, failed_most = random.Random(settings.seed), launches.FAILURES_MAX
    for turn in range(settings.samples):
        for contender in _only(settings, ELAUNCH, TORCHRUN):
            if contender == ELAUNCH or turn < failed_most:
                yield Task(
                    f"{nodes.LOSS_SECTION}, round {turn + 1} of {settings.samples}",
                    f"{nodes.LOSS_SECTION}, {contender.name}",
                    partial(nodes.losses, contender, 1, rng),
                )


def _scale(settings: Settings) -> Iterator[Task]:
    rounds = max(1, settings.samples // SAMPLES_PER_ROUND)
    limit_s = settings.limit_s
    for turn in range(rounds):
        label = f"many agents, round {turn + 1} of {rounds}"
        for agents in settings.agents:
            yield Task(label, f"{agents} agents", partial(scale.rendezvous, agents, limit_s))


def _steady(settings: Settings) -> Iterator[Task]:
    for contender in settings.contenders:
        run = partial(steady.windows, contender, settings.samples)
        yield Task(steady.SECTION, f"{steady.SECTION}, {contender.name}", run)


def _first_lines(settings: Settings) -> Iterator[Task]:
    for turn in range(settings.samples):
        label = f"first line, round {turn + 1} of {settings.samples}"
        for contender in settings.contenders:
            run = lambda contender=contender: [launches.first_line(contender)]  # noqa: E731
            yield Task(label, f"first line, {contender.name}", run)


def _sides(settings: Settings) -> tuple[Side, ...]:
    programs = {contender.program for contender in settings.contenders}
    return tuple(side for side in SIDES if side.contender.program in programs)


def _state_restarts(settings: Settings) -> Iterator[Task]:
    rng, parts = random.Random(settings.seed), chunks(settings.samples, RESTARTS_PER_JOB)
    for number, count in enumerate(parts, 1):
        for side in _sides(settings):
            run = partial(state.restarts, side, count, settings.limit_s, rng)
            yield Task(f"{state.RESTART_SECTION}, round {number} of {len(parts)}", f"state: {side.name}", run)


def _state_costs(settings: Settings) -> Iterator[Task]:
    if KEPT not in _sides(settings):
        return
    workers = min(state.COST_WORKERS, max(settings.workers))
    # On CPUs that two ranks share, a pair of turns with a gigabyte takes a quarter of an hour.
    for size_mb in state.SIZES_MB if workers == 1 else state.SIZES_MB[:-1]:
        count = max(1, settings.samples // (SAMPLES_PER_WINDOW if size_mb >= 1000 else 1))
        yield Task("state: steady cost", f"pairs of {size_mb} MB", partial(state.pairs, size_mb, count, workers))


def _only(settings: Settings, *wanted: Contender) -> tuple[Contender, ...]:
    return tuple(contender for contender in wanted if contender in settings.contenders)
