"""`--parallel auto`: plans that fit the memory are tried, the fastest is chosen, and a restart keeps it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from elaunch.strict_json import parse_json
from elaunch.trainer.gpt.config import AgreedRefusal, ConfigError, TrainConfig
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.memory.room import SPARE_SHARE, shared_by, tightest_room
from elaunch.trainer.parallel.build import Groups
from elaunch.trainer.parallel.estimate import Candidate, KeptCopies, Memory, candidates, memory, successors
from elaunch.trainer.parallel.plan import AUTO, PlanError, parse
from elaunch.trainer.parallel.trial import PlanTrial, collect, try_plan
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo

# So many plans are measured at most, and none after so many seconds, if one fits.
TRIALS_MAX = 8
TRYING_ENOUGH_S = 120.0
# The formulas may be too low by this share.
_MARGIN = 0.25
# A plainer plan is chosen if it takes at most so many times as long: two measurements differ by more.
_AS_FAST = 1.03
_GIB = 1 << 30


class NothingFits(Exception):
    """No plan fits into the memory: a sentence with the values and the way out."""


@dataclass(frozen=True)
class WorkerRoom:
    """The bytes that a worker may take, those that are taken before any plan, and what limits it."""

    most: int
    taken: int
    where: str


@dataclass(frozen=True)
class PlanOption:
    """A candidate, and its memory by the formulas. `taken` is what the process has without it."""

    candidate: Candidate
    memory: Memory
    taken: int

    @property
    def text(self) -> str:
        """What a user would type."""
        return self.candidate.plan.text

    @property
    def needs(self) -> int:
        """The memory without which it is not tried."""
        return self.needs_with(int(self.memory.step * (1 + _MARGIN)))

    def needs_with(self, training: int) -> int:
        """What the worker needs if the training itself takes so much."""
        return self.taken + self.memory.copies + training


def to_try(options: Sequence[PlanOption], room: WorkerRoom) -> list[PlanOption]:
    """Those that fit by the formulas, the plainest first; one of those that differ in the order of computation only."""
    found: dict[tuple[str, int, int], PlanOption] = {}
    for option in options:
        if option.needs <= room.most:
            found.setdefault(option.candidate.plan.form, option)
    return list(found.values())


def choose(
    options: Sequence[PlanOption],
    room: WorkerRoom,
    measure: Callable[[PlanOption], PlanTrial],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[PlanOption, dict[str, PlanTrial]]:
    """The fastest of those that fit as measured, and all trials by the plans' texts. Raises NothingFits.

    `options` begin with the plainest. No further one is measured once `is_over`. All workers call this with the same
    values and get the same choice.
    """
    trials: dict[str, PlanTrial] = {}
    fitting: list[PlanOption] = []
    for option in to_try(options, room):
        if fitting and (len(trials) >= TRIALS_MAX or is_over()):
            break
        trial = trials[option.text] = measure(option)
        if option.needs_with(trial.memory) <= room.most:
            fitting.append(option)
    if not fitting:
        raise NothingFits(refusal(options, room))
    best_s = min(trials[each.text].step_s for each in fitting)
    return next(each for each in fitting if trials[each.text].step_s <= _AS_FAST * best_s), trials


def refusal(options: Sequence[PlanOption], room: WorkerRoom) -> str:
    """Why nothing can be chosen, and the way out."""
    least = min(options, key=lambda each: each.needs)
    parts = {"the process itself": least.taken, "copies of the state": least.memory.copies}
    of_which = ", ".join(f"{gib(size)} {what}" for what, size in parts.items() if size)
    return (
        f"--parallel auto: no plan fits. The smallest is {least.text}: it needs {gib(least.needs)} for each worker"
        f"{f' (of which {of_which})' if of_which else ''}, and a worker may take {gib(room.most)}: {room.where}; "
        "give the job more memory, or use fewer workers on a node, a smaller --micro-batch or a smaller network"
    )


def gib(size: int) -> str:
    """Bytes in GiB, with two decimals."""
    return f"{size / _GIB:.2f} GiB"


@dataclass(frozen=True)
class KeptPlan:
    """A choice that a run has made: its state belongs to that plan."""

    plan: str
    world_size: int

    @classmethod
    def read(cls, content: bytes) -> KeptPlan:
        """Raises ValueError for what is not one."""
        try:
            record = cls(**parse_json(content))
            if parse(record.plan).is_auto or record.world_size < 1:
                raise ValueError("it is damaged")
        except (TypeError, PlanError) as error:
            raise ValueError("it is damaged") from error
        return record

    @property
    def content(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def chosen(
    config: TrainConfig,
    place: RankInfo,
    run: RunDirectory,
    device: torch.device,
    *,
    new_gpt: Callable[[], GPT],
    groups: Groups,
    say: Callable[[str], None],
) -> TrainConfig:
    """`config` with a plan in place of `auto`, the same on all ranks. Collective. Raises AgreedRefusal on all ranks.

    A run that has a state goes on with its plan, and nothing is measured. `new_gpt` and `groups` are as for `build`.
    Nothing of what was measured is left: parameters and random states are made anew.
    """
    peers = Peers()
    try:
        recorded, trouble = peers.from_rank_0(_recorded(place, run) if peers.leads else None)
        if trouble:
            raise NothingFits(trouble)
        of_node = min(peers.from_all(int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))))
        among = candidates(place.world_size, of_node, config.shape, needs_ddp=bool(config.ddp_options))
        if recorded is not None:
            return replace(config, parallel=_as_recorded(recorded, among, config, place, say))
        if not among:
            # DDP needs least of the batch; so its own refusal says what is wrong.
            replace(config, parallel="ddp").check(place)
        room = _room(device, of_node, peers)
        copies = _copies(device, of_node, peers)
        options = [
            PlanOption(each, memory(each, config.shape, copies=copies, bf16=config.bf16), room.taken) for each in among
        ]
        begun_s = time.monotonic()

        def measure(option: PlanOption) -> PlanTrial:
            # If nothing is compared, nothing is compiled: that takes no less memory.
            tried = replace(config, parallel=option.text, compile=config.compile and len(among) > 1)
            sizes = option.candidate.sizes
            trial = try_plan(tried, sizes, place.rank, device, peers, new_gpt=new_gpt, groups=groups)
            needs = option.needs_with(trial.memory)
            verdict = f"; it needs {gib(needs)} of {gib(room.most)}" if needs > room.most else ""
            say(f"parallel: {option.text}: a step takes {1000 * trial.step_s:,.1f} ms and {gib(trial.memory)}{verdict}")
            return trial

        def is_over() -> bool:
            spent: bool = peers.from_rank_0(time.monotonic() - begun_s > TRYING_ENOUGH_S)
            return spent

        say(f"parallel: each worker may take {gib(room.most)}, of which {gib(room.taken)} are taken: {room.where}")
        option, trials = choose(options, room, measure, is_over)
        say(f"parallel: {option.text} is chosen; {len(options) - len(trials)} more plans are not measured")
        _keep(KeptPlan(option.text, place.world_size), run, peers)
        return replace(config, parallel=option.text)
    except (NothingFits, PlanError, ConfigError) as error:
        raise AgreedRefusal(str(error)) from error
    finally:
        peers.close()


def _recorded(place: RankInfo, run: RunDirectory) -> tuple[KeptPlan | None, str]:
    """The run's choice if it has a state by now, and why it cannot go on if the choice is lost."""
    try:
        if not (place.generation or run.has_checkpoints()):
            # A restart of this job must not take what an earlier one has chosen here.
            if run.kept_plan():
                run.keep_plan(b"")
            return None, ""
        content = run.kept_plan()
        # Without one it is a restart before anything was chosen; nobody has a state.
        return (KeptPlan.read(content) if content else None), ""
    except (OSError, ValueError) as error:
        return None, (
            f"--parallel auto: the plan of this run cannot be read from {run.plan} ({error}); "
            "restore that file, or give another --out"
        )


def _as_recorded(
    record: KeptPlan, among: Sequence[Candidate], config: TrainConfig, place: RankInfo, say: Callable[[str], None]
) -> str:
    """The recorded plan, or with another number of workers the one that goes on with its state. Raises PlanError."""
    if record.world_size == place.world_size:
        say(f"parallel: {record.plan}, as this run has chosen")
        return record.plan
    kept = parse(record.plan)
    able = successors(kept, among, place.world_size, config.shape)
    text = next((each for each in able if each.plan.schedule == kept.schedule), able[0]).plan.text
    say(
        f"parallel: {record.plan}, as this run has chosen with {record.world_size} workers; "
        f"for {place.world_size}: {text}"
    )
    return text


def _room(device: torch.device, of_node: int, peers: Peers) -> WorkerRoom:
    """What a worker may take: that of the worker that has least. On CPUs all of a node share a cgroup or the machine.

    Page cache does not count.
    """
    # All have come as far as this.
    peers.largest([0])
    if device.type == "cuda":
        collect(device)
        free, total = torch.cuda.mem_get_info(device)
        where = f"{torch.cuda.get_device_name(device)} has {total / 1e9:.1f} GB"
        own = WorkerRoom(int(total * (1 - SPARE_SHARE)), total - free, where)
    else:
        node = tightest_room()
        own = WorkerRoom(node.most // of_node, node.used // of_node, shared_by(of_node, node))
    return min(peers.from_all(own), key=lambda each: each.most - each.taken)


def _copies(device: torch.device, of_node: int, peers: Peers) -> KeptCopies:
    """The copies of the state that the Keeper keeps in memory that counts to the workers (docs/keeper.md)."""
    nodes, has_memory = int(os.environ.get("GROUP_WORLD_SIZE", 1)), bool(os.environ.get("ELAUNCH_MEMORY"))
    if device.type != "cpu" or not all(peers.from_all(has_memory)):
        return KeptCopies()
    # Of parts a node has those of its workers and of the node before it.
    return KeptCopies(of_replicated=2 / of_node, of_parts=2 if nodes == 1 else 6)


def _keep(record: KeptPlan, run: RunDirectory, peers: Peers) -> None:
    """Keep the choice before there is a state. All ranks wait until it is written."""
    trouble = ""
    if peers.leads:
        try:
            run.keep_plan(record.content)
        except OSError as error:
            trouble = f"--parallel auto: the choice cannot be kept in {run.plan} ({error.strerror or error})"
    if trouble := peers.from_rank_0(trouble):
        raise NothingFits(f"{trouble}; make room there, or give {record.plan} in place of {AUTO}")
