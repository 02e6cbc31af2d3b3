"""`tune(model)`: how DDP sends gradients is measured once, agreed on by all ranks, and remembered."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo
from elaunch.trainer.tuning import hooks, passes, rebuild
from elaunch.trainer.tuning.memory import ChoiceFiles, TunedChoice, TuningKey
from elaunch.trainer.tuning.search import SearchResult, SearchSpace
from elaunch.trainer.tuning.settings import FIELDS, LOSSY_HOOKS, CommSettings
from elaunch.trainer.tuning.steps import StepTuner

_MB = 1 << 20
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")


class Tuned:
    """What `tune` has done, or does while the program trains.

    `settings` are the present ones; `is_done` tells whether they stay. `hook_state` is the state of a chosen hook for
    the Keeper's argument of that name, None without one. `result` is what was measured, None if nothing was.
    """

    def __init__(self, settings: CommSettings) -> None:
        self.settings = settings
        self.is_done = True
        self.hook_state: Any = None
        self.result: SearchResult | None = None


def tune(
    model: nn.Module,
    *,
    warm_up: Callable[[], object] | None = None,
    lossy: bool = False,
    fixed: Collection[str] = (),
    about: str = "",
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Choose the buckets and views of `model`'s DDP, and with `lossy` also a hook that rounds gradients.

    All ranks call it after the model is in DDP, before a Keeper is made and before the first pass. A remembered choice
    is used at once. Otherwise it is measured in the first steps, or with `warm_up`, which does one forward and backward
    pass as for the Keeper, before the first step. Only then PowerSGD is tried, since a Keeper needs its `hook_state`.
    Tuning never keeps what is slower than the model as it is.

    Fields of CommSettings in `fixed` stay, as do sizes, views and hooks that the program gave DDP. `about` says what
    else decides how long a pass takes, as the batch size. `folder` is the run's own, where the choice is kept too.
    `say` takes sentences on rank 0. Raises ValueError for an unknown field or several DDP wrappers.
    """
    if unknown := set(fixed) - set(FIELDS):
        raise ValueError(f"fixed has {', '.join(sorted(unknown))}; its words are {', '.join(FIELDS)}")
    ddp = rebuild.wrapper_in(model)
    size = ddp.process_group.size() if ddp is not None else 1
    leads = ddp is None or dist.get_rank(ddp.process_group) == 0
    to_people = (say or _to_stderr) if leads else _to_nobody
    if ddp is None or size == 1:
        what = "the model is in no DistributedDataParallel" if ddp is None else "there is one worker"
        to_people(f"nothing to tune: {what}")
        return Tuned(CommSettings() if ddp is None else rebuild.settings_of(ddp))
    if why := rebuild.obstacle(model, ddp):
        to_people(f"the communication is not tuned: {why}")
        return Tuned(rebuild.settings_of(ddp))
    hooks_to_try = [hook for hook in LOSSY_HOOKS if hook != "powersgd" or warm_up is not None] if lossy else []
    return _Tuning(ddp, hooks_to_try, frozenset(fixed), about, folder, to_people).begin(warm_up)


class _Tuning:
    """One call of `tune` for a model that can be tuned."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        hooks_to_try: Sequence[str],
        fixed: frozenset[str],
        about: str,
        folder: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._ddp, self._say = ddp, say
        self._fixed = fixed | rebuild.given_by_program(ddp)
        self._start = rebuild.settings_of(ddp)
        self._peers = Peers(ddp.process_group)
        self._files = ChoiceFiles.of(os.environ, folder)
        self._hooks = () if "hook" in self._fixed else self._able(hooks_to_try)
        self._key = _key_of(ddp, self._start, self._fixed, self._hooks, about)
        self._tuned = Tuned(self._start)

    def begin(self, warm_up: Callable[[], object] | None) -> Tuned:
        # Rank 0's files alone count: all ranks must do the same.
        found, sentences = self._peers.from_rank_0(self._remembered() if self._peers.leads else None)
        for sentence in sentences:
            self._say(sentence)
        if found is not None:
            self._use(found.settings)
            self._peers.close()
            return self._tuned
        space = self._space(warm_up is not None)
        if warm_up is not None:
            self._finish(passes.measure(self._ddp, space, warm_up, self._peers))
        else:
            self._tuned.is_done = False
            StepTuner(self._ddp, space, self._peers, self._finish)
        return self._tuned

    def _able(self, hooks_to_try: Sequence[str]) -> tuple[str, ...]:
        """Those that can run on all ranks."""
        here = {one for one in hooks_to_try if hooks.works_here(one, self._ddp)}
        everywhere = set.intersection(*self._peers.from_all(here))
        return tuple(one for one in hooks_to_try if one in everywhere)

    def _remembered(self) -> tuple[TunedChoice | None, list[str]]:
        """The choice to use, None to measure, and what is said of it."""
        found, file, sentences = self._files.find(self._key)
        if found is not None:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.at))
            return found, [*sentences, f"communication: {found.settings.words}, as measured on {when} (kept in {file})"]
        is_restart = RankInfo.from_environ(os.environ).generation > 0
        if is_restart and (earlier := self._files.find_of_run(self._key)):
            # A restart does not wait for a measurement.
            sentence = (
                f"communication: {earlier.settings.words}, as this run measured with {earlier.key.world_size} workers; "
                f"for {self._key.world_size} the next start of the job measures"
            )
            return earlier, [*sentences, sentence]
        if is_restart:
            sentences.append("communication: no choice of an earlier generation is left; this one may choose otherwise")
        return None, sentences

    def _space(self, has_warm_up: bool) -> SearchSpace:
        gradients = [each for each in self._ddp.module.parameters() if each.requires_grad]
        return SearchSpace(
            self._start,
            sum(each.numel() * each.element_size() for each in gradients) / _MB,
            fixed=self._fixed,
            hooks=self._hooks,
            runs_alone=has_warm_up,
            is_static=bool(self._ddp.static_graph),
        )

    def _finish(self, result: SearchResult | None) -> None:
        """The search is over. Without a result the model is used in a way in which nothing can be measured."""
        if result is None:
            self._say("the communication is not tuned: the model is used within join()")
            self._use(self._start)
        else:
            self._use(result.settings)
            self._tuned.result = result
            if self._peers.leads:
                self._say(sentence_of(result, *self._files.keep(_choice_of(result, self._key))))
        self._tuned.is_done = True
        self._peers.close()

    def _use(self, settings: CommSettings) -> None:
        # Anew even if they are the present ones: buckets settle in the same way after each start.
        self._tuned.hook_state = rebuild.apply(self._ddp, settings)
        self._tuned.settings = settings


def sentence_of(result: SearchResult, kept: Path | None, why_not: str) -> str:
    """What was measured, what it gained and what it cost, in one sentence."""
    spent = f"communication tuned in {result.passes} passes ({result.spent_s:.1f} s)"
    where = f"kept in {kept}" if kept else f"not kept: {why_not}"
    if result.settings == result.start:
        return f"{spent}: {result.start.words} as before, {result.reason}; {where}"
    return (
        f"{spent}: {result.settings.words}; a pass takes {_time(result.chosen_s)}, with the program's own settings "
        f"{_time(result.start_s)} ({result.gain:.2f} times as fast); {where}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _choice_of(result: SearchResult, key: TuningKey) -> TunedChoice:
    return TunedChoice(
        result.settings,
        result.start_s,
        result.chosen_s,
        result.passes,
        at=time.time(),
        key=key,
    )


def _key_of(
    ddp: DistributedDataParallel, start: CommSettings, fixed: frozenset[str], hooks_tried: Sequence[str], about: str
) -> TuningKey:
    digest = hashlib.sha256()
    for name, each in ddp.module.named_parameters():
        digest.update(repr((name, tuple(each.shape), str(each.dtype), each.requires_grad)).encode())
    size = ddp.process_group.size()
    device = torch.cuda.get_device_name(ddp.device) if ddp.device.type == "cuda" else ddp.device.type
    interfaces = [f"{name}={os.environ[name]}" for name in _INTERFACES if os.environ.get(name)]
    return TuningKey(
        model=digest.hexdigest()[:32],
        world_size=size,
        nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        link=" ".join([dist.get_backend(ddp.process_group), device, *interfaces]),
        torch=torch.__version__,
        hooks=" ".join(hooks_tried),
        start=repr((start, sorted(fixed))),
        about=about,
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _to_nobody(text: str) -> None:
    pass
