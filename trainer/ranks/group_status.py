"""Whether the collectives of this process have succeeded, by the status of its process groups.

To the GPU's stream an aborted NCCL collective appears finished: only its process group records the failure. So a commit
queries the groups after it has waited for the gradients. See docs/decisions/038-commit-queries-the-group.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_REASONS = {
    "TIMEOUT": "a collective took longer than the timeout of the group",
    "COMM_ERROR": "NCCL reported an error",
    "REMOTE_ERROR": "another rank reported an error",
}


class BrokenGroup(RuntimeError):
    """A collective of this step has failed on this rank: what it has computed may be incomplete."""


class GroupStatus:
    """The status of all process groups of this process. `groups` lists them; the default lists torch's.

    Gloo has none (an empty one from torch 2.14 on): its collectives raise. torch before 2.7 has none for NCCL either.
    """

    def __init__(self, groups: Callable[[], Iterable[Any]] | None = None) -> None:
        self._groups = groups or _all_groups
        # The names of all groups, and the backends with a status: a reference to gloo's would keep its threads alive.
        self._names: tuple[str, ...] = ()
        self._queried: list[tuple[str, Any]] = []
        self._world = _world()

    @property
    def is_known(self) -> bool:
        """Whether some group has a status."""
        return any(True for _ in self._errors())

    def error(self) -> str:
        """Why a collective of this process has failed, as a clause; "" if none is known to have."""
        if self._world is not None and _world() is not self._world:
            return "the default process group was destroyed or aborted"
        for group, error in self._errors():
            if error != "SUCCESS":
                return f"{_REASONS.get(error, error)} ({error}, group {group})"
        return ""

    def require_clean(self, otherwise: str) -> None:
        """Raise BrokenGroup, which begins with `otherwise`, if a collective has failed."""
        if error := self.error():
            raise BrokenGroup(f"{otherwise}: {error}")

    def _errors(self) -> Iterator[tuple[str, str]]:
        names = tuple(group.group_name for group in self._groups())
        if names != self._names:
            backends = [(g.group_name, g._get_backend(device)) for g in self._groups() for device in g._device_types]
            self._names, self._queried = names, [each for each in backends if _has_status(each[1])]
        for name, backend in self._queried:
            yield name, backend.get_error().name


def require_reported_aborts(environ: Mapping[str, str], *, has_nccl: bool, is_known: bool) -> str:
    """A warning if steps with incomplete gradients could be committed, else "". `is_known`: groups have a status.

    Raises ValueError with TORCH_NCCL_ASYNC_ERROR_HANDLING=2.
    """
    handling = environ.get(_HANDLING, "3")
    if not has_nccl or is_known or handling not in ("1", "2"):
        return ""
    text = (
        f"{_HANDLING} is {handling}, and torch before 2.7 does not report that it has aborted a collective: steps with "
        "incomplete gradients could be committed; unset it, or use torch 2.7 or later"
    )
    if handling == "2":
        raise ValueError(text)
    return text


def _has_status(backend: Any) -> bool:
    try:
        backend.get_error()
    except (AttributeError, RuntimeError):
        return False
    return type(backend).__name__ != "ProcessGroupGloo"


def has_nccl() -> bool:
    """Whether a group of this process uses NCCL."""
    return any("nccl" in dist.get_backend_config(group) for group in _all_groups())


def _all_groups() -> list[Any]:
    # torch has no public list of the groups; this one has been in every release since 2.0.
    return list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []


def _world() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
