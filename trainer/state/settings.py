"""Program settings besides tensors: `requires_grad`, `training`, values of modules, and the groups of its optimizers.

A program changes them once (`if step == 50:`), and would not do so again after a restart from a later step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.state.live_tensors import plain_name
from elaunch.trainer.state.model_state import is_sharded, put_options
from elaunch.trainer.state.module_values import ModuleValues
from elaunch.trainer.state.packing import NotPlain
from elaunch.trainer.state.tree import State, cloned, some

_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")
# An optimizer's groups: the options and the parameters of each.
_Groups = list[tuple[State, list[Tensor]]]
_FINAL = "make its groups and freeze its parameters before the Keeper (a group with lr=0 waits), or use DDP"


class _Noted(NamedTuple):
    """The settings at one moment."""

    requires_grad: list[bool]
    training: list[bool]
    groups: list[_Groups]
    values: State


class Settings:
    """The settings of `model`, which is inside the wrappers of `models`, and of `optimizers`.

    After a restart a program repeats the body of the next step, but not what came after the last commit. So the
    settings of a step are those at the end of its body, which `note` records. Until then they are the current ones, but
    `training` is that at the end of the commit.
    """

    def __init__(self, models: Sequence[nn.Module], model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._model = model
        self._optimizers = optimizers
        inner = {id(module) for module in model.modules()}
        self._wrappers = [
            (f"{type(module).__name__} {number}", module)
            for number, one in enumerate(models)
            for module in one.modules()
            if id(module) not in inner
        ]
        # FSDP swaps other parameters into the modules during a pass.
        self._is_sharded = is_sharded(model)
        self.values = ModuleValues()
        self._read_model()
        self._start = self._now()
        self._given = self._start.requires_grad
        self._known_groups = _ids(self._start.groups)
        self._noted: _Noted | None = None
        # Whether a restore's settings are set again before the first step.
        self._is_due = False
        # Whether all values of the last step are known; whether `unreduced` and `replaced` have reported.
        self._is_checked = self._has_reported = self._has_reported_modules = False
        # Modules without parameters and buffers that were replaced or removed since the start.
        self._replaced: list[str] = []
        # Values that either the commit or the body of the next step was the first to change.
        self._unclear: dict[str, object] = {}
        self._restored: list[str] = []
        # The parameters in groups that a restore has added, by optimizer.
        self._added: dict[int, set[int]] = {}

    def _read_model(self) -> None:
        self._names = [plain_name(name) for name, _ in self._model.named_parameters()]
        self._parameters = [*self._model.parameters()]
        self._flags = [f"requires_grad of {name}" for name in self._names]
        inner = self._inner()
        modules = [*self._wrappers, *inner]
        self._places, self._modules = [name for name, _ in modules], [module for _, module in modules]
        self.values.follow(modules)
        self._held = [module._parameters for _, module in inner], [module._modules for _, module in inner]
        self._seen = self._objects()
        # `training` at the end of the last commit, until `note`.
        self._modes: list[bool] | None = None

    def _inner(self) -> list[tuple[str, nn.Module]]:
        return [(plain_name(name), module) for name, module in self._model.named_modules()]

    def _objects(self) -> list[list[int]]:
        """The identities of all parameters and of all modules."""
        return [[*map(id, chain.from_iterable(map(dict.values, each)))] for each in self._held]

    def _now(self) -> _Noted:
        return _Noted(
            [*map(_REQUIRES_GRAD, self._parameters)],
            [*map(_TRAINING, self._modules)],
            [
                [({k: v for k, v in group.items() if k != "params"}, [*group["params"]]) for group in _groups_of(one)]
                for one in self._optimizers
            ],
            self.values.now(),
        )

    def _cut_off(self) -> _Noted:
        now = self._now()
        return now if self._modes is None else now._replace(training=self._modes)

    def note(self, *, is_whole: bool = True) -> None:
        """Record the settings at the end of a step's body, unless no commit came since the last call.

        Without `is_whole` the body may have been cut off in an evaluation.
        """
        self.values.begin()
        if self._noted is None:
            if self._is_checked:
                self.values.find_changes()
            self._noted, self._unclear = self._now() if is_whole else self._cut_off(), {}

    def find_changes(self) -> dict[str, tuple[Any, Any]]:
        """Between steps or at the end: return each changed value once. The changes belong to the step."""
        found = self.values.find_changes()
        if self._noted is not None:
            self._noted, self._is_checked = self._noted._replace(values=self.values.now()), True
        return found

    def changing(self) -> State:
        """What a program may set during training besides options: `requires_grad`, and values that have changed."""
        self.values.find_changes()
        return dict(zip(self._flags, map(_REQUIRES_GRAD, self._parameters), strict=True)) | self.values.now()

    def forget(self) -> None:
        """Forget what was noted: a commit begins."""
        self._noted, self._modes, self._unclear = None, None, {}
        if self._added:
            self._add_as_usual()

    def stepped(self, *, is_checked: bool) -> None:
        """The commit has ended. An evaluation may follow, which a restart does not repeat.

        If it `is_checked`, the next note finds values that were changed after it.
        """
        self._modes, self._is_checked = [*map(_TRAINING, self._modules)], is_checked
        if is_checked:
            self.values.find_changes()

    def options(self) -> list[list[State]]:
        """The options of all groups of all optimizers."""
        return [[options for options, _ in groups] for groups in (self._noted or self._now()).groups]

    def start_sizes(self) -> list[list[int]]:
        """The numbers of parameters in the groups of all optimizers at the start."""
        return [[len(parameters) for _, parameters in groups] for groups in self._start.groups]

    def state(self) -> State:
        """Plain values, for `load`: the names of what is off, changed values, and changed groups of optimizers.

        Raises NotPlain if it is unknown whether the commit or the body of the next step has changed a value.
        """
        found, now = self.values.find_changes(), self._noted or self._cut_off()
        self._unclear |= found if self._noted is not None and not self._is_checked else {}
        if self._unclear:
            raise NotPlain(f"the commit, or the step that is under way, was the first to change {some(self._unclear)}")
        # Of a wrapped module what is inside counts.
        training = dict(zip(self._places, now.training, strict=True))
        groups = enumerate(zip(self._start.groups, now.groups, strict=True))
        return {
            "frozen": [name for name, is_on in zip(self._names, now.requires_grad, strict=True) if not is_on],
            "evaluating": [name for name, is_on in training.items() if not is_on],
            "values": self.values.now() if self._noted is None else now.values,
            "groups": [None if _ids([a]) == _ids([b]) else self._named(number, b) for number, (a, b) in groups],
        }

    def _named(self, number: int, groups: _Groups) -> list[list[int | str | None]]:
        """The groups' parameters: their names in the model, else their indices in the optimizer at the start."""
        known: dict[int, int | str] = {id(one): n for n, one in enumerate(_all_of(self._start.groups[number]))}
        known |= {id(one): name for one, name in zip(self._parameters, self._names, strict=True)}
        return [[known.get(id(one)) for one in parameters] for _, parameters in groups]

    def of_step(self, number: int, state: State) -> State:
        """The state_dict of an optimizer without what the body of the next step has set. Raises NotPlain."""
        # A wrapper may have groups, and a state of another form.
        if self._noted is None or "param_groups" not in state or not _groups_of(self._optimizers[number]):
            return state
        noted, now = self._noted.groups[number], _groups_of(self._optimizers[number])
        if _ids([noted])[0] != _ids_of(now[: len(noted)]):
            raise NotPlain("the parameter groups of an optimizer were changed outside keeper.commit()")
        groups = [
            {**saved, **{key: its for key, its in options.items() if group.get(key) is not its}}
            for saved, group, (options, _) in zip(state["param_groups"], now, noted, strict=False)
        ]
        return {**state, "param_groups": groups}

    def load_groups(self, state: State) -> None:
        """Set the optimizers' groups to those of a state. Raises ValueError if a parameter is missing."""
        for number, groups in enumerate(state.get("settings", {}).get("groups", ())):
            if groups is not None:
                self._regroup(number, groups, state["param_groups"][number])

    def _regroup(self, number: int, groups: list[list[int | str]], options: list[State]) -> None:
        optimizer = self._optimizers[number]
        known: dict[int | str, Tensor] = dict(zip(self._names, self._parameters, strict=True))
        known |= dict(enumerate(_all_of(self._start.groups[number])))
        if lost := [name for group in groups for name in group if name not in known]:
            raise ValueError(
                f"the saved parameter groups refer to {some(map(str, lost))}, which this program does not have (a "
                "number is an index in the optimizer as it was made); the state belongs to another model or optimizer"
            )
        wanted = [[known[name] for name in group] for group in groups]
        pairs = zip(wanted, optimizer.param_groups, strict=False)
        same = len([*takewhile(lambda pair: [*map(id, pair[0])] == [*map(id, pair[1]["params"])], pairs)])
        del optimizer.param_groups[same:]
        for parameters, its in zip(wanted[same:], options[same:], strict=True):
            named = zip(its["param_names"], parameters, strict=True) if "param_names" in its else parameters
            optimizer.add_param_group({**cloned(its), "params": [*named]})
        self._restored.append(f"the {len(wanted)} groups of the optimizer" if len(wanted) > 1 else "its one group")
        # A program that adds a group between two loops, or before its steps, does so again.
        self._added[number] = {id(one) for group in wanted[same:] for one in group}
        vars(optimizer)["add_param_group"] = partial(self._add_again, number)

    def _add_again(self, number: int, group: dict[str, Any]) -> None:
        given = group["params"]
        parameters = [given] if isinstance(given, Tensor) else [*given]
        tensors = [one[1] if isinstance(one, tuple) else one for one in parameters]
        if not tensors or not {id(one) for one in tensors} <= self._added[number]:
            optimizer = self._optimizers[number]
            type(optimizer).add_param_group(optimizer, {**group, "params": parameters})

    def _add_as_usual(self) -> None:
        for number in self._added:
            vars(self._optimizers[number]).pop("add_param_group", None)
        self._added = {}

    def load(self, state: State) -> None:
        """Set `requires_grad`, `training` and values from a state; that of ranks with different models has none."""
        if "frozen" not in (saved := state.get("settings", {})):
            return
        frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
        changed = [
            n for n, one in zip(self._names, self._parameters, strict=True) if one.requires_grad == (n in frozen)
        ]
        self._restored += [f"requires_grad of {some(changed)}"] if changed else []
        self._set([n not in frozen for n in self._names], [n not in evaluating for n in self._places])
        others = self.values.load(saved.get("values", {}))
        self._restored += [some([f"`{path}`" for path in others])] if others else []

    def _set(self, requires_grad: list[bool], training: list[bool]) -> None:
        for parameter, is_on in zip(self._parameters, requires_grad, strict=True):
            if parameter.requires_grad != is_on:
                parameter.requires_grad_(is_on)
        for module, is_on in zip(self._modules, training, strict=True):
            if module.training != is_on:
                module.training = is_on

    def restored(self, step: int) -> str:
        """Record a restored state of `step`. Returns a sentence about what the program had set otherwise, or ""."""
        self._noted, self._is_due, self._is_checked = self._now(), step > 0, True
        self._given = self._noted.requires_grad
        return f"restored with step {step}: {' and '.join(self._restored)}" if self._restored else ""

    def are_the_programs(self) -> None:
        """The program has ended a loop after the restored step: what it sets from then on counts."""
        self._is_due = False

    def begin(self) -> None:
        """Begin a step. Before the first one after a restore, reset what the program has set since.

        It has repeated `model.train()`, or another phase of the training.
        """
        if self._is_due and self._noted is not None:
            self._is_due = False
            self._set(self._noted.requires_grad, self._noted.training)
            self.values.load(self._noted.values)
            for one, noted in zip(self._optimizers, self._noted.groups, strict=True):
                for group, (options, _) in zip(_groups_of(one), noted, strict=False):
                    put_options(group, {key: its for key, its in options.items() if group.get(key) is not its})
        if self._added:
            self._add_as_usual()
        self.values.begin()

    def refusal(self, *, is_in_parts: bool, has_zero: bool, is_by_name: bool) -> str:
        """Why a restart could not restore the current settings; "" if it can.

        `is_in_parts`: each rank has a part of the state. `has_zero`: by ZeRO-1. `is_by_name`: the ranks have different
        parameters.
        """
        if not self._is_sharded and self._objects() != self._seen:
            before = dict(zip(self._names, self._parameters, strict=True))
            known = [*zip(self._places, self._modules, strict=True)]
            now = {plain_name(name): one for name, one in self._model.named_parameters()}
            others = {name for name in {**before, **now} if before.get(name) is not now.get(name)}
            others |= _with_buffers(known) ^ _with_buffers([*self._wrappers, *self._inner()])
            if others:
                return (
                    "parameters, or modules with buffers, were added, removed or replaced since the Keeper was entered "
                    f"({some(sorted(others))}), and a restart would begin without that; add modules, prune and "
                    "parametrize before the Keeper"
                )
            inner = dict(self._inner())
            self._replaced += [name for name, one in known[len(self._wrappers) :] if inner.get(name) is not one]
            self._read_model()
        groups = [_ids_of(_groups_of(one)) for one in self._optimizers]
        if groups != self._known_groups:
            if why := _without_group(self._optimizers) or self._refused_groups(is_in_parts):
                return why
            self._known_groups = groups
        if is_in_parts and not has_zero:
            flags = zip(self._names, self._parameters, self._start.requires_grad, strict=True)
            if changed := [name for name, one, was_on in flags if one.requires_grad != was_on]:
                return (
                    f"requires_grad of {some(changed)} has changed since the Keeper was made, which is not supported "
                    f"for a sharded state (torch's fully_shard ignores it); {_FINAL}"
                )
        if is_by_name:
            modules = [*zip(self._places, self._modules, self._start.training, strict=False)][len(self._wrappers) :]
            switched = [name for name, module, was_on in modules if module.training != was_on]
            if switched and len({module.training for _, module, _ in modules}) > 1:
                return (
                    f"the training mode of {some(switched)} has changed since the Keeper was made, and that of other "
                    "modules has not, which is not supported where the ranks have different models; switch single "
                    "modules before the Keeper"
                )
        return ""

    def _refused_groups(self, is_in_parts: bool) -> str:
        if is_in_parts:
            return (
                "the parameter groups of the optimizer have changed since the Keeper was made, which is not supported "
                f"for a sharded state; {_FINAL}"
            )
        for number, groups in enumerate(self._now().groups):
            for place, names in enumerate(self._named(number, groups)):
                if None in names:
                    shape = tuple(groups[place][1][names.index(None)].shape)
                    return (
                        f"group {place} of {type(self._optimizers[number]).__name__} has a parameter of shape {shape} "
                        "that belongs to no model of the Keeper, so it could not be restored; pass its module too: "
                        "Keeper([model, …], …)"
                    )
        return ""

    def replaced(self) -> str:
        """A sentence, once, about modules that were replaced or removed since the start; "" without any."""
        if not self._replaced or self._has_reported_modules:
            return ""
        self._has_reported_modules = True
        return (
            f"modules were replaced or removed since the Keeper was entered ({some(self._replaced)}): a restart would "
            "continue with the old ones. Make them before the Keeper, and change their values instead (p = 0)"
        )

    def unreduced(self) -> str:
        """A sentence, once, about parameters that require a gradient and that DDP does not reduce; "" without any."""
        if self._has_reported or self._noted is None or self._noted.requires_grad == self._given:
            return ""
        self._given = self._noted.requires_grad
        for ddp in [module for _, module in self._wrappers if isinstance(module, DistributedDataParallel)]:
            named, ignored = ddp.module.named_parameters(), ddp.parameters_to_ignore
            wanted = sum(one.requires_grad for name, one in named if name not in ignored)
            facts: Any = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            if wanted > (reduced := facts.get("num_parameter_tensors", math.inf)):
                self._has_reported = True
                return (
                    f"{wanted} parameters require a gradient, and DistributedDataParallel reduces {reduced}: those "
                    "that required one when it was made. Unless the program reduces the others, they diverge between "
                    "ranks. Wrap the model before anything is frozen, with find_unused_parameters=True"
                )
        return ""


def _without_group(optimizers: Sequence[Any]) -> str:
    """A sentence about parameters whose group was removed, and whose state was not; "" if there are none."""
    for one in optimizers:
        known, state = {id(each) for group in _groups_of(one) for each in group["params"]}, getattr(one, "state", None)
        keys = state if known and isinstance(state, dict) else ()
        if left := [each for each in keys if isinstance(each, Tensor) and id(each) not in known]:
            return (
                f"{type(one).__name__} has the state of {len(left)} parameters that are in none of its groups any "
                "more, which its state_dict cannot name; remove that too (optimizer.state.pop(parameter)), or leave "
                "the group with lr=0"
            )
    return ""


def _with_buffers(modules: Iterable[tuple[str, nn.Module]]) -> set[str]:
    return {name for name, one in modules if any(value is not None for value in one._buffers.values())}


def _groups_of(optimizer: Any) -> Sequence[dict[str, Any]]:
    # Some optimizers have only a `state_dict`.
    found: Sequence[dict[str, Any]] = getattr(optimizer, "param_groups", ())
    return found


def _all_of(groups: _Groups) -> Iterator[Tensor]:
    return chain.from_iterable(parameters for _, parameters in groups)


def _ids(groups: list[_Groups]) -> list[list[list[int]]]:
    return [[[*map(id, parameters)] for _, parameters in its] for its in groups]


def _ids_of(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in groups]
