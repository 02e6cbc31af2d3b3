"""`requires_grad`, `training` and parameter groups that a program changes in mid-training come back."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map

from elaunch.trainer.keeper import sync_schedule
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import cloned, equal

pytestmark = pytest.mark.usefixtures("memory")

TOTAL, PER_EPOCH = 12, 4


class Failure(Exception):
    """What a rank sees when a peer dies."""


class Program:
    """A training whose subclass changes settings. It fails at `moment` of step `fails`."""

    def __init__(self, fails: int = 0, moment: str = "", folder: Path | None = None) -> None:
        torch.manual_seed(0)
        self.fails, self.moment, self.folder = fails, moment, folder
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.models = [self.model]
        self.model[0].requires_grad_(False)
        self.extra: Any = None
        self.optimizers: list[torch.optim.Optimizer] = [self.optimizer()]
        self.logged: list[str] = []

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def body(self, step: int) -> None:
        """What comes before the forward pass."""

    def commits(self, step: int) -> None:
        """What comes within the commit."""

    def tail(self, step: int) -> None:
        """What comes after the commit."""

    def steps(self, keeper: Keeper) -> Iterator[int]:
        return keeper.steps(TOTAL)

    def at(self, moment: str, step: int) -> None:
        if (moment, step) == (self.moment, self.fails):
            raise Failure

    def evaluate(self, step: int) -> None:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self.at("evaluation", step)
        for module, mode in modes:
            module.training = mode

    def run(self) -> Any:
        more: dict[str, Any] = {} if self.folder is None else {"checkpoints": self.folder, "checkpoint_every": 1}
        more |= {"extra": self.extra, "per_rank": (), "log": self.logged.append}
        with Keeper(self.models, self.optimizers, **more) as keeper:
            for step in self.steps(keeper):
                self.body(step)
                x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
                sum(model(x).square().mean() for model in self.models).backward()  # type: ignore[union-attr]
                self.at("body", step)
                with keeper.commit():
                    for one in self.optimizers:
                        one.step()
                        one.zero_grad()
                    self.commits(step)
                self.tail(step)
                self.at("tail", step)
                self.evaluate(step)
        return self.outcome()

    def outcome(self) -> Any:
        flags = [p.requires_grad for model in self.models for p in model.parameters()]
        modes = [m.training for model in self.models for m in model.modules()]
        return {"flags": flags, "modes": modes, "states": cloned(self.states())}

    def states(self) -> Any:
        return [one.state_dict() for one in (*self.models, *self.optimizers)]


class Gradually(Program):
    def body(self, step: int) -> None:
        if step in (3, 6):
            self.model[0 if step == 6 else 2].requires_grad_(True)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model[2].requires_grad_(False)


class FreezesInTheCommit(Program):
    def commits(self, step: int) -> None:
        if step == 6:
            self.model[2].requires_grad_(False)


class FreezesAfterEntry(Program):
    def steps(self, keeper: Keeper) -> Iterator[int]:
        self.model[2].requires_grad_(False)
        return keeper.steps(TOTAL)

    def body(self, step: int) -> None:
        if step == 6:
            self.model[2].requires_grad_(True)


class AddsAGroup(Program):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model[2:].parameters(), lr=0.01)

    def add(self) -> None:
        self.model[0].requires_grad_(True)
        self.optimizers[0].add_param_group({"params": self.model[0].parameters(), "lr": 0.003, "mine": "a"})

    def body(self, step: int) -> None:
        if step == 6:
            self.add()


class HasACriterion(AddsAGroup):
    """Its weight is in no model, and in the optimizer from the start."""

    def optimizer(self) -> torch.optim.Optimizer:
        self.extra = nn.Parameter(torch.ones(1))
        return torch.optim.AdamW([*self.model[2:].parameters(), self.extra], lr=0.01)


class AddsANamedGroup(AddsAGroup):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model[2:].named_parameters(), lr=0.01)

    def add(self) -> None:
        self.model[0].requires_grad_(True)
        self.optimizers[0].add_param_group({"params": [*self.model[0].named_parameters()], "lr": 0.003})


class RegroupsInTheTail(AddsAGroup):
    """The first group goes, the second one gets a parameter of it, and the rest is a third one."""

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [*self.model[2].parameters()], "lr": 0.1}, {"params": [*self.model[3].parameters()]}], lr=0.01
        )

    def body(self, step: int) -> None:
        pass

    def tail(self, step: int) -> None:
        if step == 6:
            first, second = self.optimizers[0].param_groups
            second["params"].append(first["params"].pop())
            del self.optimizers[0].param_groups[0]
            self.optimizers[0].add_param_group({"params": first["params"], "lr": 0.05})


class LowersTheRate(Program):
    def body(self, step: int) -> None:
        if step == 6:
            self.optimizers[0].param_groups[0]["lr"] *= 0.1


class FreezesBatchNorm(Program):
    """Each epoch begins with `model.train()`."""

    def steps(self, keeper: Keeper) -> Iterator[int]:
        for _, steps in keeper.epochs(TOTAL // PER_EPOCH, PER_EPOCH):
            self.model.train()
            yield from steps

    def body(self, step: int) -> None:
        if step == 6:
            self.model[1].eval()


class TwoPhases(AddsAGroup):
    def steps(self, keeper: Keeper) -> Iterator[int]:
        yield from keeper.steps(5)
        self.add()
        self.optimizers[0].param_groups[0]["lr"] *= 0.5
        yield from keeper.steps(TOTAL)

    def body(self, step: int) -> None:
        if step == 7:
            self.optimizers[0].param_groups[1]["lr"] *= 0.5


class TwoModels(AddsAGroup):
    """The second optimizer gets a group of the second model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.models.append(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).requires_grad_(False))
        self.models[1][1].requires_grad_(True)
        self.optimizers.append(torch.optim.SGD(self.models[1][1].parameters(), lr=0.1, momentum=0.9))

    def add(self) -> None:
        self.models[1][0].requires_grad_(True)
        self.optimizers[1].add_param_group({"params": self.models[1][0].parameters(), "lr": 0.01})


class Staged(nn.Sequential):
    """Its counters change what it computes."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.stage, self._passes, self.level = 0, 0.0, None

    def forward(self, x: Any) -> Any:
        self._passes += 1.0
        return super().forward(x) * (1 + self.stage + self._passes + float(self.level or 0))


class ChangesValues(Program):
    """Before the pass, in the commit, and after it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model = Staged(*self.model)
        self.models, self.optimizers = [self.model], [self.optimizer()]

    def body(self, step: int) -> None:
        if step in (6, 9):
            self.model.stage += 1

    def commits(self, step: int) -> None:
        if step == 6:
            self.model[1].momentum = 0.3

    def tail(self, step: int) -> None:
        if step == 6:
            self.model[1].eps = 0.1
            self.model.level = np.float64(0.3)  # type: ignore[assignment]
        if step == 9:
            self.model[1].momentum = None


PROGRAMS = [Gradually, FreezesInTheCommit, FreezesAfterEntry, AddsAGroup, AddsANamedGroup, RegroupsInTheTail]
PROGRAMS += [HasACriterion, LowersTheRate, FreezesBatchNorm, TwoPhases, TwoModels, ChangesValues]


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begin the next generation."""
    numbers = iter(range(1, 9))
    return lambda: monkeypatch.setenv("ELAUNCH_GENERATION", str(next(numbers)))


def interrupted(
    program: type[Program], failures: list[tuple[int, str]], generations: Callable[[], None], *args: Any
) -> Any:
    for step, moment in failures:
        with pytest.raises(Failure):
            program(step, moment, *args).run()
        generations()
    return program(0, "", *args).run()


def assert_continues(
    program: type[Program], failures: list[tuple[int, str]], memory: Path, generations: Callable[[], None]
) -> None:
    """With these failures, it ends as it does without any."""
    alone = program().run()
    shutil.rmtree(memory)
    memory.mkdir()
    generations()

    assert equal(interrupted(program, failures, generations), alone)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_training_continues_with_the_settings_that_it_had(
    program: type[Program], memory: Path, generations: Callable[[], None]
) -> None:
    failures = [(5, "tail"), (6, "body"), (6, "tail"), (7, "body"), (8, "evaluation"), (9, "body")]
    assert_continues(program, failures, memory, generations)


class ChangesLate(ChangesValues):
    """At the step that fails: that commit may be unchecked."""

    def body(self, step: int) -> None:
        if step == self.late:
            self.model.stage += 1

    def tail(self, step: int) -> None:
        pass

    late = 6


@pytest.mark.parametrize(("late", "total"), [(6, 12), (30, 34)])
def test_a_value_that_the_failed_step_has_changed_first_is_changed_once(
    late: int, total: int, memory: Path, generations: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChangesLate, "late", late)
    monkeypatch.setattr(sys.modules[__name__], "TOTAL", total)
    # No sync point comes in between.
    monkeypatch.setattr(sync_schedule, "WITHIN_S", 1000.0)

    assert_continues(ChangesLate, [(late, "body")], memory, generations)


@pytest.mark.parametrize("program", [AddsAGroup, FreezesBatchNorm, TwoPhases, TwoModels, ChangesValues])
def test_a_checkpoint_has_them(
    program: type[Program], generations: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")
    alone = program(0, "", tmp_path / "alone").run()

    failures = [(6, "body"), (9, "body")]
    assert equal(interrupted(program, failures, generations, tmp_path / "failing"), alone)


def test_a_value_that_the_training_has_not_changed_is_the_programs_own(
    generations: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")
    with pytest.raises(Failure):
        ChangesValues(9, "body", tmp_path / "c").run()
    generations()
    again = ChangesValues(0, "", tmp_path / "c")
    # Between two jobs a person has chosen other ones.
    again.model[1].momentum = again.model.other = 0.7
    again.model[1].num_features = 5
    again.run()

    assert (again.model[1].momentum, again.model.other, again.model[1].num_features) == (None, 0.7, 5)
    # The last checkpoint before the failure was written or not.
    (restored,) = [logged for logged in again.logged if logged.startswith("restored with step ")]
    assert restored.endswith(": `_passes`, `stage`, `1.momentum` and 2 more")


def test_a_replaced_module_without_a_state_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1), nn.ReLU())
    logged: list[str] = []
    with Keeper(model, torch.optim.SGD(model.parameters()), per_rank=(), log=logged.append) as keeper:
        for step in keeper.steps(8):
            if step in (3, 5):
                model[1] = nn.Dropout(step / 10)
            with keeper.commit():
                pass

    (warning,) = logged
    assert warning.startswith("modules were replaced or removed since the Keeper was entered (1): a restart would")


@pytest.mark.parametrize(("lose_at_most", "refused"), [(100, "step 31"), (1, "step 20")])
def test_after_the_first_commits_what_is_not_kept_is_refused_before_a_copy_or_a_sync_point(
    lose_at_most: int, refused: str
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    options: dict[str, Any] = {"lose_at_most": lose_at_most, "per_rank": (), "log": lambda _: None}

    def train() -> None:
        with Keeper(model, torch.optim.SGD(model.parameters()), **options) as keeper:
            for step in keeper.steps(40):
                with keeper.commit():
                    if step == 20:
                        model.add_module("late", nn.Linear(1, 1))

    with pytest.raises(TypeError, match=f"{refused} is not committed: parameters, .* were added"):
        train()


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (
            nn.Parameter(torch.ones(2, 5)),
            r"group 1 of AdamW has a parameter of shape \(2, 5\) that belongs to no model of",
        ),
        (nn.Linear(1, 1), r"parameters, .* were added, removed or replaced .*\(late\.bias, late\.weight\)"),
        (nn.BatchNorm1d(1, affine=False), r"parameters, or modules with buffers, were added, .* replaced .*\(late\)"),
    ],
    ids=["AddsAStranger", "AddsAModule", "AddsAModuleOfBuffers"],
)
def test_what_no_restart_could_find_is_refused_immediately(added: Any, why: str) -> None:
    class Adds(AddsAGroup):
        def add(self) -> None:
            if isinstance(added, nn.Module):
                self.model.add_module("late", added)
            else:
                self.optimizers[0].add_param_group({"params": [added]})

    with pytest.raises(TypeError, match=f"step 6 is not committed: {why}"):
        Adds().run()


class Zero(Gradually):
    def optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)

    def states(self) -> Any:
        zero: Any = self.optimizers[0]
        return [self.model.state_dict(), [zero.optim.state[each] for each in self.model.parameters()]]


class ZeroAddsAGroup(AddsAGroup):
    def optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.model[2:].parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)


class Sharded(FreezesBatchNorm):
    def optimizer(self) -> torch.optim.Optimizer:
        fully_shard(self.model)
        return super().optimizer()

    def states(self) -> Any:
        tensors: Any = [*self.model.parameters(), *self.optimizers[0].state.values()]
        return [tree_map(lambda one: getattr(one, "_local_tensor", one), each) for each in tensors]


class ShardedUnfreezes(Sharded, Gradually):
    def body(self, step: int) -> None:
        Gradually.body(self, step)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("program", [Zero, Sharded])
def test_where_each_rank_has_a_part_of_the_state_flags_come_back(
    program: type[Program], memory: Path, generations: Callable[[], None]
) -> None:
    assert_continues(program, [(7, "body"), (8, "evaluation"), (9, "body")], memory, generations)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (ZeroAddsAGroup, r"step 6 is not committed: the parameter groups of the optimizer have changed"),
        (ShardedUnfreezes, r"step 3 is not committed: requires_grad of 2\.weight, 2\.bias has changed since"),
    ],
)
def test_where_each_rank_has_a_part_of_the_state_other_changes_are_refused(program: type[Program], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        program().run()


@pytest.mark.usefixtures("group")
def test_parameters_that_ddp_does_not_reduce_are_named_once() -> None:
    program: Any = Gradually()
    program.models = [nn.parallel.DistributedDataParallel(program.model)]
    program.run()

    logged = [each for each in program.logged if "require a gradient" in each]
    assert [each.partition(":")[0] for each in logged] == [
        "6 parameters require a gradient, and DistributedDataParallel reduces 4"
    ]
