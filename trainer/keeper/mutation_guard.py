"""Finds tensors of the state that change between two commits, where nothing may change them."""

from __future__ import annotations

import ctypes
from operator import attrgetter, is_

from torch import Tensor
from torch.cuda import is_current_stream_capturing

from elaunch.trainer.state.live_tensors import LiveTensors
from elaunch.trainer.state.tree import equal, some

# torch counts the changes of a tensor. `tensor.data = other` is not counted, but changes its address. A write through
# `tensor.data` (`tensor.data.copy_(average)`) changes neither: so some values of some weights are compared.
_VERSION = attrgetter("_version")
_MEMORY = Tensor.data_ptr
_SAMPLED, _SAMPLE = 2, 32

# This many refusals in a row of a copy that is due raise an error: there would never be a copy.
_REFUSALS_MAX = 3


class MutationGuard:
    """Compares the tensors of `live` with what they were at the end of the last commit, which `note` takes.

    Until `note` nothing counts as changed.
    """

    def __init__(self, live: LiveTensors) -> None:
        self._live = live
        # The noted tensors; a brief note leaves out those of the optimizers' states.
        self._is_brief = False
        self._noted: list[Tensor] | None = None
        self._versions: list[int] = []
        self._memory: list[int] = []
        self._states: list[tuple[int, int]] = []
        self._is_reported = False
        self._sentence = ""
        self._refusals = 0
        self._sampled: list[_Sampled] = []
        self._samples: list[bytes | Tensor] = []
        self._few_versions: list[int] = []
        self._exchanged = ""

    def note(self, *, is_brief: bool = False) -> None:
        """A commit has ended, or a state was restored. All its tensors can be kept.

        If `is_brief`, only changes of weights and `extra` are detected, and replaced memory by its values alone.
        """
        self._is_brief, seen = is_brief, self._live.seen(optimizers=not is_brief)
        self._versions = list(map(_VERSION, seen))
        self._states = [] if is_brief else self._live.states()
        self._sampled = self._sampled or self._chosen()
        self._few_versions, self._samples = self._versions_of_few(), list(map(_Sampled.values, self._sampled))
        self._sentence = self._exchanged = ""
        self._memory = [] if is_brief else list(map(_MEMORY, seen))
        # Last: nothing is compared after a commit that was refused.
        self._noted = seen

    def _chosen(self) -> list[_Sampled]:
        weights = [each for each in self._live.parameters if each.requires_grad and each.is_contiguous()]
        few = weights[:: max(1, len(weights) // _SAMPLED)]
        return [_Sampled(getattr(each, "_local_tensor", each)) for each in few]

    def _versions_of_few(self) -> list[int]:
        return [each.weight._version for each in self._sampled]

    def compare_values(self, step: int) -> None:
        """Compare the sampled values too. On a GPU `found` does not: this waits for the device."""
        self._exchanged = ""
        is_cuda = any(each.weight.is_cuda for each in self._sampled)
        if self._noted is None or (is_cuda and is_current_stream_capturing()):
            return
        if not all(map(equal, self._samples, map(_Sampled.values, self._sampled))):
            self._exchanged = (
                f"the weights were replaced through `.data` after step {step}. Until they are put back, a failure goes "
                "back to the previous copy, and a commit would update the replacement. Evaluate averaged weights in a "
                "separate model, or with torch.func.functional_call"
            )

    def has_changed(self) -> bool:
        """Whether one of the sampled weights has changed since the commit: faster than `found`, for each step."""
        return self._noted is not None and self._few_versions != self._versions_of_few()

    def forget(self) -> None:
        """A commit begins. Tensors that it replaces must not be kept alive."""
        self._noted = None

    def found(self, step: int) -> str:
        """A sentence that names the change since the commit of `step`; "" if there is none."""
        if self._noted is None or self._sentence:
            return self._sentence
        if self._samples and not isinstance(self._samples[0], Tensor):
            self.compare_values(step)
        now = self._live.seen(optimizers=not self._is_brief)
        if not self._is_same(self._noted, now):
            self._sentence = (
                f"{self._changed(self._noted, now)} changed outside keeper.commit() after step {step}. A failure "
                "before the next commit ends goes back to the previous copy; a checkpoint, a stop and the end keep "
                "this state as it is. Move that change into the commit"
            )
        return self._sentence or self._exchanged

    def warning(self, step: int) -> str:
        """`found`, but only once in the life of this object."""
        found = "" if self._is_reported else self.found(step)
        self._is_reported |= bool(found)
        return found

    def allow_copy(self, step: int) -> bool:
        """Whether a copy that is due may be made of this state. Raises RuntimeError if none ever may."""
        self._refusals = self._refusals + 1 if (found := self.found(step)) else 0
        if self._refusals == _REFUSALS_MAX:
            raise RuntimeError(f"{found}: it happens after each step, so there would never be a copy")
        return not self._refusals

    def _is_same(self, before: list[Tensor], now: list[Tensor]) -> bool:
        return (
            (self._is_brief or self._states == self._live.states())
            and len(before) == len(now)
            and all(map(is_, before, now))
            and self._versions == list(map(_VERSION, now))
            and (not self._memory or self._memory == list(map(_MEMORY, now)))
        )

    def _changed(self, before: list[Tensor], now: list[Tensor]) -> str:
        """The first tensor that differs, and the number of the others."""
        memory = self._memory or map(_MEMORY, before)
        known = {id(tensor): facts for tensor, *facts in zip(before, self._versions, memory, strict=False)}
        # A new tensor may have no memory of its own.
        changed = [t for t in now if id(t) not in known or known[id(t)] != [t._version, t.data_ptr()]]
        if not changed:
            return "the state of an optimizer, or the number of tensors in `extra`,"
        return some((f"`{name}`" for name in dict.fromkeys(map(self._live.name_of, changed))), 1)


class _Sampled:
    """A weight, of which `values` returns a few values; on a GPU a copy there, without synchronization."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._count = min(_SAMPLE, weight.numel())
        self._begin = (weight.numel() - self._count) // 2
        # Where the weight is on a CPU, and the memory of those values.
        self._address, self._memory = 0, (ctypes.c_char * 0)()

    def values(self) -> bytes | Tensor:
        weight = self.weight
        if not weight.is_cpu:
            return weight.detach().as_strided((self._count,), (1,), weight.storage_offset() + self._begin).clone()
        if (address := weight.data_ptr()) != self._address:
            kind = ctypes.c_char * (self._count * weight.itemsize if address else 0)
            self._address, self._memory = address, kind.from_address(address + self._begin * weight.itemsize)
        return self._memory.raw
