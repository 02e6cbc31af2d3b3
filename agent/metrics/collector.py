"""Makes Prometheus' metrics of what this node knows, only when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from elaunch import __version__
from elaunch.agent.core.state import Agent, Finished, Running, Stopping
from elaunch.agent.metrics.counters import Counts


@dataclass(frozen=True)
class NodeState:
    """What one scrape reads. `steps` are the newest steps by rank; `started_at` is the wall clock (s)."""

    agent: Agent
    counts: Counts
    steps: Mapping[int, int]
    steps_per_s: float
    started_at: float


Family = CounterMetricFamily | GaugeMetricFamily


class NodeCollector(Collector):
    """The metrics of a node, from `read()`, which any thread may call. Each has the labels `run_id` and `node`."""

    def __init__(self, read: Callable[[], NodeState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        state = self._read()
        yield from _of_the_job(state)
        yield from _of_workers(state)
        yield from _of_counts(state)


class _Families:
    """Makes metric families whose samples have the labels of one node."""

    def __init__(self, agent: Agent) -> None:
        self._own = [agent.spec.run_id, agent.me.host]

    def gauge(self, name: str, help: str, value: float, **labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help, labels=["run_id", "node", *labels])
        family.add_metric([*self._own, *labels.values()], value)
        return family

    def gauges(self, name: str, help: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help, labels=["run_id", "node", label])
        for of, value in values.items():
            family.add_metric([*self._own, of], value)
        return family

    def counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=["run_id", "node"])
        family.add_metric(self._own, value)
        return family

    def counters(self, name: str, help: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=["run_id", "node", label])
        for of, value in values.items():
            family.add_metric([*self._own, of], value)
        return family


def _of_the_job(state: NodeState) -> Iterator[Family]:
    agent, make = state.agent, _Families(state.agent)
    snapshot, table = agent.snapshot, agent.snapshot.current_table
    yield make.gauge("elaunch_build_info", "Always 1; the version of elaunch is a label.", 1, version=__version__)
    yield make.gauge("elaunch_start_time_seconds", "When elaunch began on this node (Unix time).", state.started_at)
    generation = snapshot.generation.number if snapshot.generation else -1
    yield make.gauge("elaunch_generation", "The newest generation that this node knows of, -1 before.", generation)
    size, nodes = (table.world_size, len(table.seats)) if table else (0, 0)
    yield make.gauge("elaunch_world_size", "Workers of all nodes in the newest generation; 0 while it forms.", size)
    yield make.gauge("elaunch_nodes", "Nodes in the newest generation; 0 while it forms.", nodes)
    restarts = snapshot.table.restarts if snapshot.table else 0
    yield make.counter("elaunch_restarts", "Restarts of the job that count to --max-restarts.", restarts)
    yield make.gauge("elaunch_restarts_max", "The budget of restarts (--max-restarts).", agent.spec.max_restarts)
    yield make.gauge("elaunch_leader", "1 if this node leads the job.", agent.leads)
    is_here = agent.reach.failing_since_s is None and not agent.store_gone
    yield make.gauge("elaunch_store_reachable", "1 if the job's store does as this node asks.", is_here)


def _of_workers(state: NodeState) -> Iterator[Family]:
    agent, make = state.agent, _Families(state.agent)
    live = dict.fromkeys(("running", "stopping", "finished"), 0.0)
    match agent.phase:
        case Running(live=ranks):
            live["running"] = len(ranks)
        case Stopping(live=ranks):
            live["stopping"] = len(ranks)
        case Finished():
            live["finished"] = agent.me.slots
    yield make.gauge("elaunch_node_up", "1 while workers of this node run.", live["running"] > 0)
    yield make.gauges("elaunch_workers", "Workers of this node, by state.", "state", live)
    steps = {str(rank): float(step) for rank, step in state.steps.items()}
    yield make.gauges("elaunch_step", "The newest step that each rank of this node reported.", "rank", steps)
    speed = "Steps per second of this node's workers, over the last ten seconds or more."
    yield make.gauge("elaunch_steps_per_second", speed, state.steps_per_s)


def _of_counts(state: NodeState) -> Iterator[Family]:
    counts, make = state.counts, _Families(state.agent)
    failures = {kind: float(count) for kind, count in counts.failures.items()}
    yield make.counters("elaunch_failures", "Generations that failed by this node's workers.", "kind", failures)
    if counts.last_failure:
        at, kind = counts.last_failure
        when = "When this node's workers failed last (Unix time)."
        yield make.gauge("elaunch_last_failure_timestamp_seconds", when, at, kind=kind)
    yield make.counter("elaunch_hangs", "Hangs of this node's workers, or of the whole job.", counts.hangs)
    repeated = "Steps that were trained again after a restart."
    yield make.counter("elaunch_steps_repeated", repeated, counts.steps_repeated)
    seconds = {use.value: spent for use, spent in counts.seconds.items()}
    yield make.counters("elaunch_time_seconds", "This node's time, by what it was used for.", "use", seconds)
