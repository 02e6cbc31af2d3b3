"""Periodically compares the tensors that ranks replicate: a copy that differs from the others is damaged."""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elaunch.trainer.keeper.copies import Copies
from elaunch.trainer.keeper.guarded_state import GuardedState
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.state import Version
from elaunch.trainer.state.model_state import is_fsdp1
from elaunch.trainer.state.training_state import Training
from elaunch.trainer.state.tree import digests, some

# The differing rank fails first: its failure is the one that is reported, and that counts against its node.
_FIRST_S = 5.0


class Differs(RuntimeError):
    """A rank's copy of a tensor differs from the others'. Raised on all ranks.

    No state since the last comparison is kept in memory.
    """


@dataclass(frozen=True)
class RankDigest:
    """What one rank holds: its host, a digest of which tensors it has, and a digest of their values."""

    host: str
    holds: str
    values: str


class Verification:
    """Compares the ranks' tensors every `every` steps, and before each checkpoint; with None never.

    `version` was just restored. Ranks that hold the same tensors are compared: with DDP all, with HSDP the replicas of
    a shard, with ZeRO-1 all, but only the weights.
    """

    def __init__(
        self,
        training: Training,
        peers: Peers,
        copies: Copies,
        version: Version,
        checkpoint_every: int,
        every: int | None,
    ) -> None:
        self._training, self._peers, self._copies = training, peers, copies
        self._is_off = every is None or peers.world_size == 1
        if every is not None and is_fsdp1(training.model):
            raise ValueError(
                f"verify_every is {every}, and FullyShardedDataParallel does not show which part of a parameter a rank "
                "has; leave verify_every out, or use fully_shard"
            )
        self._every = (every or 1, checkpoint_every)
        # A state in parts, or a large one, has two slots: both hold compared snapshots only.
        self._is_strict = copies.steps.is_off = not self._is_off and (training.has_large or training.is_in_parts)
        self._compared = version
        if not self._is_off:
            copies.verified = version if version.step else None

    def due_snapshot(self, state: GuardedState, *, is_due: bool) -> bool:
        """Compare if that is due. Returns whether a snapshot is due, as after each comparison. Collective."""
        step = state.version.step
        if self._is_off or not any(step // every > self._compared.step // every for every in self._every):
            return is_due and not self._is_strict
        self.compare(state)
        return True

    def compare(self, state: GuardedState) -> None:
        """Compare now, unless this state has been compared. Collective: all ranks call it after the same step.

        Raises Differs on all ranks if a copy differs, and forgets all states since the last comparison: the wrong
        copy's gradients have changed the others too.
        """
        version = state.version
        if self._is_off or version == self._compared:
            return
        tensors = self._tensors()
        found = digests({name: tensor for name, (tensor, _) in tensors.items()})
        holds = [(name, str(tensor.dtype), tuple(tensor.shape), part) for name, (tensor, part) in tensors.items()]
        # All ranks have the same tensors of a replicated state, or something is wrong.
        held = hashlib.sha256(repr(holds).encode()).hexdigest() if self._training.is_in_parts else ""
        values = hashlib.sha256(repr([*found.items()]).encode()).hexdigest()
        of_ranks = self._peers.all_gather(RankDigest(socket.gethostname(), held, values))
        wrong = differing(of_ranks)
        if wrong:
            # First: a rescue must not keep this state.
            state.give_up()
            all_found = self._peers.all_gather(found)
            self._copies.drop_unverified()
            if self._peers.rank not in wrong:
                time.sleep(_FIRST_S)
            raise Differs(sentence(of_ranks, all_found, wrong, version.step, self._compared.step))
        self._compared = version
        self._copies.compared = version

    def _tensors(self) -> dict[str, tuple[Tensor, Any]]:
        """This rank's tensors by name, each with the part of it that this rank has."""
        found: dict[str, tuple[Tensor, Any]] = {}
        for name, tensor in self._training.live_tensors.named(optimizers=not self._training.has_zero):
            mesh: Any = getattr(tensor, "device_mesh", None)
            if mesh is None:
                found[name] = tensor, ()
                continue
            spread: Any = tensor
            at = zip(mesh.get_coordinate(), spread.placements, strict=True)
            part = tuple(place for place, placement in at if not placement.is_replicate())
            found[name] = spread.to_local(), part
        return found


def differing(of_ranks: Sequence[RankDigest]) -> list[int]:
    """The ranks whose values differ from those of most ranks with the same tensors; without a majority all of these."""
    wrong = []
    for holds in dict.fromkeys(one.holds for one in of_ranks):
        ranks = [rank for rank, one in enumerate(of_ranks) if one.holds == holds]
        values = Counter(of_ranks[rank].values for rank in ranks)
        most, count = values.most_common(1)[0]
        if len(values) > 1:
            wrong += [rank for rank in ranks if of_ranks[rank].values != most or 2 * count <= len(ranks)]
    return sorted(wrong)


def sentence(
    of_ranks: Sequence[RankDigest], found: Sequence[Mapping[str, int]], wrong: Sequence[int], step: int, compared: int
) -> str:
    """One sentence: which ranks differ in which tensor, and what the training goes back to."""
    rank = wrong[0]
    alike = [other for other, one in enumerate(of_ranks) if one.holds == of_ranks[rank].holds]
    right = [other for other in alike if other not in wrong]
    other = next(other for other in right or alike if of_ranks[other].values != of_ranks[rank].values)
    # One of them may not even have a tensor of that name.
    names = [name for name in {**found[rank], **found[other]} if found[rank].get(name) != found[other].get(name)]
    what = some((f"`{name}`" for name in names), 1)
    if right:
        whom = f"the other {len(right)} ranks'" if len(right) > 1 else f"rank {right[0]}'s"
        which = f"rank {rank}'s copy of {what} on {of_ranks[rank].host} differs from {whom}"
        rest = [str(other) for other in wrong[1:]]
        which += f", and so does rank {', '.join(rest)}" if rest else ""
    else:
        ranks = " and ".join(f"rank {each} on {of_ranks[each].host}" for each in wrong)
        which = f"{ranks} have different copies of {what}, and it is unknown which is right"
    since = f"goes back to step {compared}, after which they were equal" if compared else "starts over"
    return (
        f"{which} after step {step}: silent data corruption, or a change that not all ranks made. The training {since}"
        ". If it happens again, test that host's memory and GPU; a program whose ranks differ on purpose leaves out "
        "verify_every"
    )
