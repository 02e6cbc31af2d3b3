"""What the Keeper warns of in a program that has more state than it was given, and what it refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from elaunch.trainer.keeper import entry_checks, sync_schedule
from elaunch.trainer.keeper.entry_checks import EntryChecks
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.keeper.unkept import digest, named
from elaunch.trainer.state.training_state import Training

pytestmark = pytest.mark.usefixtures("memory")


class Program:
    """A training whose commit calls `commits`, whose step begins with `begins`, and ends with `ends` after it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.begins: Callable[[int], object] = lambda step: None
        self.commits: Callable[[int], object] = lambda step: None
        self.ends: Callable[[int], object] = lambda step: None
        self.logged: list[str] = []

    def run(self, steps: int = 6, **kept: Any) -> str:
        with Keeper(self.model, self.optimizer, log=self.logged.append, **{"per_rank": (), **kept}) as keeper:
            for step in keeper.steps(steps):
                self.begins(step)
                self.model.train()
                self.model(torch.randn(4, 4)).sum().backward()
                with keeper.commit():
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.commits(step)
                self.ends(step)
        return "\n".join(self.logged)

    @torch.no_grad()
    def average(self, into: list[torch.Tensor]) -> None:
        for mean, weight in zip(into, self.model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(weight.data, alpha=0.1)

    def evaluate_with(self, weights: list[torch.Tensor]) -> None:
        own = [weight.detach().clone() for weight in self.model.parameters()]
        for given in (weights, own):
            for weight, value in zip(self.model.parameters(), given, strict=True):
                weight.data.copy_(value)
            if given is weights:
                self.model.eval()
                self.model(torch.ones(2, 4))


def test_a_scheduler_that_is_not_given_is_named_at_entry() -> None:
    program = Program()
    scheduler = StepLR(program.optimizer, 2)

    assert program.run() == (
        "the program's StepLR is not kept: a restart resets it. Pass it to the Keeper (scheduler=…), and call its "
        "step() in the commit"
    )
    assert scheduler.last_epoch == 0


class Noam:
    """A schedule of the program's own, which is no LRScheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, counts: bool) -> None:
        self.optimizer, self.counts, self.steps, self.factor = optimizer, counts, 0, 0.1

    def step(self, step: int) -> None:
        if self.counts:
            self.steps += 1
        self.optimizer.param_groups[0]["lr"] = self.factor / (self.steps or step)


@pytest.mark.parametrize("counts", [True, False])
def test_a_schedule_of_the_programs_own_is_named_if_it_counts_the_steps_itself(counts: bool) -> None:
    program = Program()
    schedule = Noam(program.optimizer, counts=counts)
    program.commits = schedule.step

    logged = "the program's Noam counts the steps of a learning rate, and is not kept: a restart resets it."
    assert program.run().startswith(logged) if counts else program.run() == ""


def test_a_scheduler_that_steps_outside_the_commit_is_named_once() -> None:
    program = Program()
    scheduler = StepLR(program.optimizer, 100)
    program.ends = lambda step: scheduler.step()

    assert program.run(scheduler=scheduler).startswith(
        "`StepLR.last_epoch` changed outside keeper.commit() after step 1 (from 0 to 1): a failure in between"
    )
    assert len(program.logged) == 1


@pytest.mark.parametrize("at", ["ends", "begins"])
def test_options_that_change_when_a_step_ends_are_named_and_those_that_it_begins_with_are_not(at: str) -> None:
    program = Program()
    setattr(program, at, lambda step: program.optimizer.param_groups[0].update(lr=0.1 / step))

    logged = program.run()

    begins = "`param_groups[0].lr` changed outside keeper.commit() after step 1 (from 0.01 to 0.1)"
    assert logged.startswith(begins) if at == "ends" else logged == ""


@pytest.mark.parametrize(("name", "value", "named"), [("frozen", True, "requires_grad of 0.weight"), ("p", 2, "p")])
@pytest.mark.parametrize("at", ["ends", "commits", "begins"])
def test_a_flag_or_a_value_that_changes_after_the_commit_is_named(at: str, name: str, value: int, named: str) -> None:
    program = Program()
    program.model.p = 1  # type: ignore[assignment]

    def change(step: int) -> None:
        if step == 2 and name == "frozen":
            program.model[0].weight.requires_grad_(False)
        elif step == 2:
            program.model.p = value  # type: ignore[assignment]

    setattr(program, at, change)

    found = [logged for logged in [program.run(), *program.logged] if "outside" in logged]
    assert bool(found) == (at == "ends")
    assert all(logged.startswith(f"`{named}` changed outside keeper.commit() after step 2 (") for logged in found)


def test_an_averaged_model_is_named() -> None:
    program = Program()
    average = AveragedModel(program.model)
    program.commits = lambda step: average.update_parameters(program.model)

    assert program.run() == (
        "`average` follows the weights, and is not kept: a restart resets it. Pass it to the Keeper (extra=…), and "
        "update it in the commit. A copy that is made before each use needs nothing"
    )


@pytest.mark.parametrize("how", ["given", "frozen"])
def test_an_average_that_is_given_and_a_copy_that_stays_are_not_named(how: str) -> None:
    program = Program()
    other = copy.deepcopy(program.model)
    means = [weight.detach() for weight in other.parameters()]
    if how == "given":
        program.commits = lambda step: program.average(means)

    assert program.run(extra={"means": means} if how == "given" else None) == ""


def test_weights_that_are_put_in_for_an_evaluation_are_named() -> None:
    program = Program()
    means = [weight.detach().clone() for weight in program.model.parameters()]
    program.commits = lambda step: program.average(means)
    program.ends = lambda step: program.evaluate_with(means) if step == 3 else None

    assert program.run(extra={"means": means}).startswith(
        "the weights were replaced through `.data` after step 3. Until they are put back, a failure goes back to the "
        "previous copy"
    )


@pytest.mark.parametrize("at", ["ends", "commits", "begins"])
def test_a_buffer_that_changes_between_a_commit_and_the_next_step_is_named(at: str) -> None:
    program = Program()
    program.model.register_buffer("level", torch.zeros(1))
    setattr(program, at, lambda step: program.model.get_buffer("level").add_(1))

    logged = program.run()

    named = "the buffers `level` changed between step 1 and the next one. A failure in between restores the old values"
    assert logged.startswith(named) if at == "ends" else not logged


@pytest.mark.parametrize("how", ["draws", "is seeded in each step", "rests", "is given"])
def test_only_a_generator_that_draws_on_is_named(how: str) -> None:
    program = Program()
    noise = torch.Generator().manual_seed(1)

    def begins(step: int) -> None:
        if how == "is seeded in each step":
            noise.manual_seed(step)
        if how != "rests":
            torch.randn(1, generator=noise)

    program.begins = begins
    logged = program.run(per_rank=noise if how == "is given" else ())

    assert (
        logged.startswith("the program draws from the generator `noise`, which is not kept")
        if how == "draws"
        else not logged
    )


def test_parameters_of_the_optimizer_that_the_keeper_lacks_are_refused() -> None:
    program = Program()
    head = nn.Linear(3, 3)
    program.optimizer.add_param_group({"params": head.parameters()})

    with pytest.raises(
        ValueError, match=r"AdamW changes 2 parameters .* \(of shapes \(3, 3\), \(3,\)\).*Pass all modu"
    ):
        program.run()
    assert program.run(extra=head, name="second") == ""


def test_a_restarted_job_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    for generation in ("0", "1"):
        monkeypatch.setenv("ELAUNCH_GENERATION", generation)
        program = Program()
        program.ends = lambda step, own=program: own.optimizer.param_groups[0].update(lr=1 / step)  # type: ignore[misc]
        program.begins = lambda step, left=generation: 1 / (step - 4 if left == "0" else 1)  # type: ignore[misc]
        with pytest.raises(ZeroDivisionError) if generation == "0" else nullcontext():
            program.run()
        logged.append([sentence for sentence in program.logged if "outside" in sentence])

    assert [len(its) for its in logged] == [1, 0]


@pytest.mark.parametrize(
    ("begun", "named"),
    [
        ("average", "`average` follows the weights"),
        ("scheduler", "the program's StepLR is not kept"),
        ("optimizer", "the program's Adam steps, and is not kept: a restart resets it and its parameters"),
        ("generator", "the program draws from the generator `noise`"),
        ("loader", "the position of a DataLoader of this program is not kept"),
    ],
)
def test_what_begins_in_mid_training_is_named(monkeypatch: pytest.MonkeyPatch, begun: str, named: str) -> None:
    monkeypatch.setattr(entry_checks, "_APART_S", 0.0)
    monkeypatch.setattr(entry_checks, "_SHARE", 1e9)
    # There is a sync point after each step.
    monkeypatch.setattr(sync_schedule, "WITHIN_S", 0.0)
    program = Program()
    average = noise = loader = scheduler = optimizer = None
    weights = [nn.Parameter(torch.ones(2))]

    def commits(step: int) -> None:
        nonlocal average, noise, loader, scheduler, optimizer
        if step == 7:
            average = AveragedModel(program.model) if begun == "average" else None
            noise = torch.Generator() if begun == "generator" else None
            loader = DataLoader(weights, shuffle=True) if begun == "loader" else None  # type: ignore[arg-type]
            scheduler = StepLR(program.optimizer, 2) if begun == "scheduler" else None
            optimizer = torch.optim.Adam(weights) if begun == "optimizer" else None
        elif step > 7:
            if average is not None:
                average.update_parameters(program.model)
            if optimizer is not None:
                weights[0].sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            torch.randn(1, generator=noise)

    program.commits = commits
    # A loader of another test may still be there.
    logged = program.run(12, per_rank=None if begun == "loader" else ())

    assert logged.startswith(named)
    assert len(program.logged) == 1


@pytest.mark.parametrize("how", ["average", "copy before the step", "copy after it"])
def test_an_average_of_new_tensors_in_each_step_is_named_and_a_copy_is_not(how: str) -> None:
    program = Program()
    means = [weight.detach().clone() for weight in program.model.parameters()]

    def renew(step: int) -> None:
        nonlocal means
        part = 0.1 if how == "average" else 1.0
        pairs = zip(means, program.model.parameters(), strict=True)
        means = [mean.lerp(weight.detach(), part) for mean, weight in pairs]

    setattr(program, "begins" if how == "copy before the step" else "commits", renew)
    logged = program.run()

    assert logged.startswith("`means` follows the weights") if how == "average" else not logged


class Ranks:
    """Two ranks, of which the other one has what `its` gives."""

    rank, world_size, leads = 0, 2, True

    def __init__(self, its: Callable[[], Any]) -> None:
        self._its = its

    def all_gather(self, value: Any) -> list[Any]:
        its = self._its()
        return [value, its if isinstance(value, dict) else crc32(repr(sorted(its.items())).encode())]


def checks_of(
    seed: int = 0,
    lr: float = 0.1,
    its: Callable[[], Any] = dict,
    order: int = 1,
    moment: float = 0.0,
    frozen: bool = False,
    **extra: Any,
) -> EntryChecks:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    model.bias.requires_grad = not frozen
    optimizer = torch.optim.SGD([*model.parameters()][::order], lr=lr)
    optimizer.state[model.bias] = {"momentum_buffer": torch.full((2,), moment)}
    kept = {"scheduler": None, "scaler": None, "extra": extra, "hook_state": None, "per_rank": ()}
    options: Any = {"log": lambda logged: None, "is_first": False, "is_others": False}
    peers: Any = Ranks(its)
    return EntryChecks(Training(model, optimizer, extra=extra), {"model": model, **kept}, peers, None, **options)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 1}, "`weight`, `bias` of rank 1 differs from rank 0's. The ranks train one model"),
        ({"frozen": True}, "`requires_grad of bias` of rank 1 differs from rank 0's. The ranks train one model"),
        ({"lr": 0.2}, "`optimizer.param_groups.0.lr` of rank 1 differs"),
        ({"order": -1}, "`optimizer.order of parameters` of rank 1 differs"),
        ({"moment": 1.0}, "`optimizer.state.0.momentum_buffer` of rank 1 differs"),
        ({"x": 1}, "`extra.x` of rank 1 differs from rank 0's. It must be the same on all ranks"),
        ({"mask": torch.tensor([0, 1])}, "`extra.mask` of rank 1 differs"),
        ({"names": {"b"}}, "`extra.names` of rank 1 differs"),
        ({"y": 1}, "`extra.y` of rank 1 differs"),
    ],
)
def test_ranks_that_differ_are_refused_by_the_name_of_what_differs(other: dict[str, Any], named: str) -> None:
    same = {"x": 0, "mask": torch.tensor([1, 0]), "names": {"a"}}
    its = checks_of(**{**same, **other})

    with pytest.raises(ValueError, match="of rank 1 differs") as refused:
        checks_of(**same, its=lambda: dict(its._alike())).enter(0, (0, {}))
    assert str(refused.value).startswith(named)


def test_ranks_that_are_alike_and_restored_ones_are_not_refused() -> None:
    same = checks_of(x={"a", "b"}, seed=3)
    checks_of(x={"b", "a"}, seed=3, its=lambda: dict(same._alike())).enter(0, (0, {}))
    checks_of(seed=4, its=lambda: dict(same._alike())).enter(7, (0, {}))


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        (lambda one: one._kept["extra"][1].update(x=1), "`extra.1.x` of rank 1 differs from rank 0's after step 100"),
        (lambda one: setattr(one._kept["model"], "stage", 1), "`attribute stage` of rank 1 differs from rank 0's"),
        (lambda one: one._kept["extra"][0][1].running_mean.add_(1), "`extra.0.1.running_mean` of rank 1 differs"),
    ],
)
def test_ranks_that_become_different_in_mid_training_are_named(
    monkeypatch: pytest.MonkeyPatch, differs: Callable[[EntryChecks], Any], named: str
) -> None:
    logged: list[str] = []
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    others = checks_of(x=0, net=copy.deepcopy(net))
    mine = checks_of(x=0, net=net, its=lambda: dict(others._alike()))
    mine._log = logged.append
    for one in (mine, others):
        one._kept["extra"] = [one._kept["extra"].pop("net"), one._kept["extra"]]
        one._kept["model"].stage = 0
        one._training.settings.values.begin()
        one._commits, one._syncs = 1, 5
    for step in range(90, 110):
        if step == 95:
            differs(others)
            others._training.settings.values.find_changes()
        mine.sync_point(step)

    assert len(logged) == 1
    assert logged[0].startswith(named)


def test_a_step_that_draws_other_numbers_than_before_the_failure_is_named() -> None:
    for again in (2, 3):
        logged: list[str] = []
        checks = checks_of()
        checks._log, checks._peers = logged.append, SimpleNamespace(rank=0, world_size=1, leads=True)  # type: ignore[assignment]
        checks.enter(5, (6, {"random": {"torch": torch.tensor([2])}}))
        checks.drawn(6, {"random": {"torch": torch.tensor([again])}})
        checks.committed(6, is_checked=True)
        assert (logged != []) == (again == 3)


def removes_a_group(program: Program) -> None:
    program.optimizer.param_groups.pop()


def replaces_a_parameter(program: Program) -> None:
    program.model[2].weight = nn.Parameter(torch.ones(1, 8))


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (removes_a_group, "AdamW has the state of 1 parameters that are in none of its groups any more"),
        (replaces_a_parameter, r"parameters, or modules with buffers, were added, removed or replaced .*2\.weight"),
    ],
)
@pytest.mark.parametrize("moment", ["begins", "commits", "ends"])
def test_a_parameter_that_goes_is_refused_by_name_also_after_the_last_commit(
    change: Callable[[Program], None], refused: str, moment: str
) -> None:
    program = Program()
    *others, last = program.model.parameters()
    program.optimizer = torch.optim.AdamW([{"params": others}, {"params": [last]}])
    setattr(program, moment, lambda step: change(program) if step == 4 else None)

    with pytest.raises(TypeError, match=refused):
        program.run(4)


def test_a_generator_that_has_drawn_one_number_more_is_another_one() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(1, generator=generator)
    ((name, before),) = named("noise", generator)
    torch.randn(1, generator=generator)
    ((_, after),) = named("noise", generator)

    assert name == "generator `noise`"
    assert digest(before) != digest(after)


def test_values_in_the_programs_objects_are_found_by_their_paths_and_kept_ones_are_left_out() -> None:
    class Sampler:
        weight = 1.0

        def __init__(self) -> None:
            self.epoch, self.rng, self.model = 3, random.Random(1), model

    model = torch.nn.Linear(1, 1)

    found = dict(named("sampler", Sampler(), frozenset({id(model)})))

    assert found.keys() == {"sampler.weight", "sampler.epoch", "generator `sampler.rng`"}
    # A step that sets it makes it the object's own.
    assert (found["sampler.epoch"], found["sampler.weight"]) == ("3", "1.0")
