"""This process's place in a process group, and the channels of the group's ranks, which meet by the group's store."""

from __future__ import annotations

import functools
import hmac
import itertools
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from elaunch.trainer.ranks.channel import Channel


@dataclass(frozen=True)
class GroupMember:
    """Rank `rank` of `world_size` in the group of that name; without a group this process is the only rank.

    A rank is waited for as long as `timeout_s`. This does not have the group itself: who holds it keeps its threads
    alive.
    """

    rank: int = 0
    world_size: int = 1
    group_name: str = ""
    timeout_s: float | None = None

    @classmethod
    def of(cls, group: Any = None) -> GroupMember:
        """This process in `group`, by default the job's."""
        group = group or dist.group.WORLD
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        return cls(rank, world_size, group.group_name, _timeout_s(group)) if world_size > 1 else cls()

    def channel(self, purpose: str) -> Channel:
        """A channel of its own for this purpose. All ranks of a group open its channels in the same order."""
        generation = os.environ.get("ELAUNCH_GENERATION", "")
        name = f"elaunch/{generation}/{self.group_name}/{purpose}"
        name += f"/{next(_count(name))}"
        contacts = _StoreContacts(name, may_be_old=not generation and _outlives_restarts(os.environ))
        return Channel(name, self.rank, self.world_size, contacts, timeout_s=self.timeout_s)


def _outlives_restarts(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent has the store: then it keeps all keys at a restart.

    Nothing that torchrun tells its workers names a restart: each node counts those of its own workers alone, and a node
    that joins is not counted.
    """
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True)
class _StoreContacts:
    """Where the ranks of a channel listen, in the store by which the job's process group was made.

    Everybody who reaches MASTER_PORT can read that store. So under elaunch it holds no secret as it is: the agents have
    given one to all ranks of the generation.
    """

    channel: str
    may_be_old: bool

    def publish(self, rank: int, content: bytes) -> None:
        key = f"{self.channel}/{rank}"
        _store().set(key, _masked(key, content))

    def find(self, rank: int) -> bytes | None:
        # Not `wait` with a limit: torch prints two warnings whenever its time is over.
        key = f"{self.channel}/{rank}"
        return _masked(key, bytes(_store().get(key))) if _store().check([key]) else None


def _masked(key: str, contact: bytes) -> bytes:
    """The contact with its secret, which comes first, masked by a pad for this key; masking it again reveals it."""
    given = os.environ.get("ELAUNCH_GENERATION_SECRET", "")
    pad = hmac.digest(given.encode(), key.encode(), "sha256") if given else b""
    return bytes(map(operator.xor, contact, pad)) + contact[len(pad) :]


def _store() -> Any:
    # torch has no public name for it; this one has been in every release since 1.8.
    return dist.distributed_c10d._get_default_store()


@functools.cache
def _count(name: str) -> Iterator[int]:
    return itertools.count()


def _timeout_s(group: Any) -> float:
    """How long a rank of the group is waited for: as long as gloo would wait, in this group or in a new one."""
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [each._timeout for each in options if hasattr(each, "_timeout")]
    if not limits or "gloo" not in dist.get_backend_config(group):
        # A GPU's collectives are short. What is agreed here may take a checkpoint's time.
        limits.append(dist.distributed_c10d.default_pg_timeout)
    return float(max(limits).total_seconds())
