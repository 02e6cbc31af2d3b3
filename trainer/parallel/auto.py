"""`--parallel auto`: the workers are measured, some plans are tried, one is chosen, and a restart keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from elaunch.strict_json import parse_json
from elaunch.trainer.gpt.config import AgreedRefusal, ConfigError, TrainConfig
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.gpt.run_directory import RunDirectory
from elaunch.trainer.parallel.build import Groups
from elaunch.trainer.parallel.candidates import Candidate, WorkerCount, candidates, successors
from elaunch.trainer.parallel.choice import (
    NothingFits,
    PlanChoice,
    PlanOption,
    PlanRoom,
    PlanTrial,
    StepMemory,
    choose,
    choose_by_estimate,
    gib,
    rows,
    table,
)
from elaunch.trainer.parallel.estimate import KeptCopies, WorkerSpeed, estimate
from elaunch.trainer.parallel.plan import AUTO, PlanError, parse
from elaunch.trainer.parallel.speed import worker_speed
from elaunch.trainer.parallel.trial import try_plan
from elaunch.trainer.parallel.worker_memory import PeakMeter, keep_little_of_what_is_freed, worker_room
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo

_FORMAT = 2


@dataclass(frozen=True)
class KeptPlan:
    """A choice that a run has made. Its state belongs to that plan.

    `memory` is that of its steps. `worker` is as it was measured then. `room` and `tried` are for people and benches:
    the bytes that a worker may take, and a row for each plan.
    """

    plan: str
    world_size: int
    memory: StepMemory
    worker: WorkerSpeed
    room: int
    tried: list[dict[str, Any]]

    @classmethod
    def read(cls, content: bytes) -> KeptPlan:
        """Raises ValueError for what is not one."""
        found = parse_json(content)
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        try:
            parts = {"worker": WorkerSpeed(**found["worker"]), "memory": StepMemory(**found["memory"])}
            record = cls(**{**found, **parts})
            if parse(record.plan).is_auto or record.world_size < 1 or min(asdict(record.memory).values()) < 1:
                raise ValueError("it is damaged")
        except (TypeError, KeyError, PlanError) as error:
            raise ValueError("it is damaged") from error
        return record

    @property
    def content(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode() + b"\n"


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
    if device.type == "cpu":
        keep_little_of_what_is_freed()
    peers = Peers()
    try:
        return replace(config, parallel=_Choosing(config, place, run, device, peers, say).plan(new_gpt, groups))
    except (NothingFits, PlanError, ConfigError) as error:
        raise AgreedRefusal(str(error)) from error
    finally:
        peers.close()


class _Choosing:
    def __init__(
        self,
        config: TrainConfig,
        place: RankInfo,
        run: RunDirectory,
        device: torch.device,
        peers: Peers,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._place, self._run, self._device = config, place, run, device
        self._peers, self._say = peers, say
        of_node, has_memory, nodes = _surroundings(os.environ, place)
        told = peers.from_all((of_node, has_memory, nodes))
        self._of_node = min(of_node for of_node, _, _ in told)
        self._workers = WorkerCount(place.world_size, self._of_node)
        self._copies = KeptCopies(self._of_node)
        if device.type == "cpu" and all(has for _, has, _ in told):
            # See docs/trainer.md: of parts a node has those of its workers and of the node before it.
            is_alone = max(nodes for _, _, nodes in told) == 1
            self._copies = KeptCopies(self._of_node, of_replicated=2, of_parts=2 if is_alone else 6)

    def plan(self, new_gpt: Callable[[], GPT], groups: Groups) -> str:
        """The text of the chosen plan."""
        found, trouble = self._peers.from_rank_0(self._recorded() if self._peers.leads else None)
        if trouble:
            raise NothingFits(trouble)
        if found is not None:
            return self._as_recorded(found)
        among = self._candidates()
        if not among:
            # DDP needs least of the batch; so its own words say what is wrong.
            self._config_of("ddp").check(self._place)
        self._import_all()
        plans = [each.plan for each in among]
        room, taken = self._room()
        meter = PeakMeter(self._device)
        worker = worker_speed(self._config, self._device, self._peers, plans, free=room.bytes - taken)
        if self._device.type == "cuda":
            # NCCL's buffers are not among what the meter sees.
            room, taken = self._room()
        else:
            # The imports for measuring come on top. A second fork server that came meanwhile counts already.
            meter.start()
            taken += self._peers.largest([meter.left])[0]
        worker = replace(worker, base_bytes=taken)
        meter = PeakMeter(self._device)
        options = self._options(among, worker)
        rank = self._place.rank

        def measure(option: PlanOption) -> PlanTrial:
            config = self._config_of(option.text)
            if len(among) == 1:
                # Nothing is compared, and a step that is not compiled takes no less memory.
                config = replace(config, compile=False)
            sizes = option.candidate.sizes
            return try_plan(config, sizes, rank, self._device, self._peers, meter=meter, new_gpt=new_gpt, groups=groups)

        self._say(
            f"parallel: each worker may take {gib(room.bytes)} GiB, of which {gib(taken)} are taken: {room.where}"
        )
        choice = choose(options, room, measure)
        for line in table(choice, options, room):
            self._say(f"parallel: {line}")
        self._keep(choice, worker, rows(choice, options), room)
        return choice.option.text

    def _recorded(self) -> tuple[KeptPlan | None, str]:
        """The run's choice if it has a state by now, and why it cannot go on if the choice is lost."""
        try:
            if not (self._place.generation or self._run.has_checkpoints()):
                # A restart of this job must not take what an earlier one has chosen here.
                if self._run.kept_plan():
                    self._run.keep_plan(b"")
                return None, ""
            content = self._run.kept_plan()
            if not content:
                # A restart before anything was chosen; nobody has a state.
                return None, ""
            return KeptPlan.read(content), ""
        except (OSError, ValueError) as error:
            return None, (
                f"--parallel auto: the plan of this run cannot be read from {self._run.plan} ({error}); "
                "restore that file, or give another --out"
            )

    def _as_recorded(self, record: KeptPlan) -> str:
        kept = parse(record.plan)
        is_same = record.world_size == self._place.world_size
        if is_same and self._place.generation:
            # It was measured here, and runs since then.
            self._say(f"parallel: {record.plan}, as this run has chosen")
            return record.plan
        among = successors(kept, self._candidates(), self._workers, self._config.shape)
        if is_same:
            among = [each for each in among if each.text == record.plan] or among
        if self._place.generation:
            # They are there, and so among what is taken.
            self._copies = KeptCopies(self._of_node)
        room, taken = self._room()
        options = self._options(among, replace(record.worker, base_bytes=taken), record.memory)
        option = choose_by_estimate(options, room)
        other = "" if is_same else f" with {record.world_size} workers; for {self._place.world_size}: {option.text}"
        self._say(f"parallel: {record.plan}, as this run has chosen{other}")
        return option.text

    def _candidates(self) -> list[Candidate]:
        return candidates(self._workers, self._config.shape, needs_ddp=self._config.needs_ddp)

    def _options(
        self, among: Sequence[Candidate], worker: WorkerSpeed, known: StepMemory | None = None
    ) -> list[PlanOption]:
        shape, bf16 = self._config.shape, self._config.bf16
        return [
            PlanOption(each, estimate(each.plan, each.sizes, shape, worker, copies=self._copies, bf16=bf16), known)
            for each in among
        ]

    def _room(self) -> tuple[PlanRoom, int]:
        """What a worker may take in all, and what it has taken by now: of the worker that has least room."""
        # All have come as far as this.
        self._peers.largest([0])
        own = worker_room(self._device, self._of_node)
        least = min(self._peers.from_all(own), key=lambda each: each.most - each.taken)
        return PlanRoom(least.most, least.where), least.taken

    def _import_all(self) -> None:
        """What any of the plans imports: it is no part of a plan's memory."""
        if self._place.world_size > 1:
            from torch.distributed import fsdp  # noqa: F401
            from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401

            from elaunch.trainer.parallel import divided, tensor  # noqa: F401

    def _keep(self, choice: PlanChoice, worker: WorkerSpeed, tried: list[dict[str, Any]], room: PlanRoom) -> None:
        """Keep the choice before there is a state. All ranks wait until it is written."""
        option = choice.option
        trial = choice.trials[option.text]
        memory = StepMemory(option.estimate.memory.step, trial.memory)
        record = KeptPlan(option.text, self._place.world_size, memory, worker, room.bytes, tried)
        trouble = ""
        if self._peers.leads:
            try:
                self._run.keep_plan(record.content)
            except OSError as error:
                trouble = f"--parallel auto: the choice cannot be kept in {self._run.plan} ({error.strerror or error})"
        if trouble := self._peers.from_rank_0(trouble):
            raise NothingFits(f"{trouble}; make room there, or give {option.text} in place of {AUTO}")

    def _config_of(self, text: str) -> TrainConfig:
        return replace(self._config, parallel=text)


def _surroundings(environ: Mapping[str, str], place: RankInfo) -> tuple[int, bool, int]:
    """The number of workers on this node, whether it keeps copies of the state in memory, and the number of nodes."""

    def number(name: str, default: int) -> int:
        return int(environ.get(name, default))

    of_node = number("LOCAL_WORLD_SIZE", place.world_size)
    return of_node, bool(environ.get("ELAUNCH_MEMORY")), number("GROUP_WORLD_SIZE", 1)
