"""Which samples a step trains on, and which rank computes them. A pure function of seed, step and world size.

The unit is the micro-batch. A step consists of the same M micro-batches at any world size; the ranks only divide them.
So neither a restart nor another world size moves, loses or repeats a sample.

An epoch's order is a pseudo-random permutation that is computed per index, in constant memory: a Feistel network over
the next even number of bits with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

_ROUNDS = 4
_MASK_64 = 2**64 - 1


@dataclass(frozen=True)
class Micro:
    """A micro-batch as one rank computes it.

    `number` is its index in the step, 0…M-1, or -1 for a filler (`Order.even`). `samples` are the ids in order; empty
    for a filler. Multiply its mean loss by `weight`.
    `key` seeds everything random in it. `is_last` marks the rank's last micro-batch of the step: only its backward sums
    gradients over the ranks.
    """

    number: int
    samples: tuple[int, ...]
    weight: float
    key: int
    is_last: bool


@dataclass(frozen=True)
class Order:
    """The order of a job's data: `size` samples per epoch.

    Steps count from 1, and each trains on `global_batch` samples in M = `global_batch / micro_batch` micro-batches.
    Every sample is drawn once per epoch, shuffled unless `shuffle=False`. If `global_batch` does not divide `size`, a
    step continues into the next epoch. `even` gives all ranks the same number of forward passes, the surplus ones with
    weight 0. Models with a collective forward pass (FSDP, SyncBatchNorm) need it if the world size does not divide M.
    Any step is computed directly. Raises ValueError with one sentence for values that contradict each other.
    """

    size: int
    _: KW_ONLY
    global_batch: int
    micro_batch: int
    seed: int = 0
    shuffle: bool = True
    even: bool = False

    def __post_init__(self) -> None:
        batch, micro = self.global_batch, self.micro_batch
        for name, number in (("size", self.size), ("global_batch", batch), ("micro_batch", micro)):
            if number < 1:
                raise ValueError(f"{name} ({number}) must be at least 1")
        if batch % micro:
            raise ValueError(
                f"global_batch ({batch}) is not a multiple of micro_batch ({micro}); use micro_batch "
                f"{fitting_micro_batch(batch, micro)} or global_batch {-(-batch // micro) * micro}"
            )

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches of a step: constant for the job's whole life, and the largest world size."""
        return self.global_batch // self.micro_batch

    def span(self, step: int, micro: int | None = None) -> range:
        """The positions of `step`, or of one of its micro-batches, in the sequence of all epochs.

        Position p is sample number `p % size`, in drawing order, of epoch `p // size`.
        """
        if step < 1:
            raise ValueError(f"step {step} does not exist; steps count from 1")
        first = (step - 1) * self.global_batch
        if micro is None:
            return range(first, first + self.global_batch)
        if not 0 <= micro < self.micro_batches:
            raise ValueError(f"micro-batch {micro} is not one of a step's {self.micro_batches}, which count from 0")
        return range(first + self.micro_batch * micro, first + self.micro_batch * (micro + 1))

    def sample(self, position: int) -> int:
        """The id of the sample at that position: an index into the dataset."""
        epoch, index = divmod(position, self.size)
        return permuted(index, self.size, key_of(self.seed, epoch)) if self.shuffle else index

    def samples(self, step: int, micro: int) -> tuple[int, ...]:
        """The ids of one micro-batch of step 1, 2, …"""
        return tuple(self.sample(position) for position in self.span(step, micro))

    def microbatches(self, step: int) -> list[list[int]]:
        """The ids of all M micro-batches of `step`, of all ranks."""
        return [list(self.samples(step, micro)) for micro in range(self.micro_batches)]

    def share(self, rank: int, world_size: int) -> range:
        """The numbers of the micro-batches that `rank` computes in every step.

        They are contiguous, and the counts of two ranks differ by at most one. Raises ValueError if there are more
        ranks than micro-batches.
        """
        many = self.micro_batches
        if world_size > many:
            if self.global_batch < world_size:
                fits = f"global_batch {self.micro_batch * world_size}"
            else:
                fits = f"micro_batch {fitting_micro_batch(self.global_batch, self.global_batch // world_size)}"
            raise ValueError(
                f"{world_size} workers are more than the {many} micro-batches of a step (global_batch "
                f"{self.global_batch} / micro_batch {self.micro_batch}); use at most {many} workers, or {fits}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}, which count from 0")
        return range(many * rank // world_size, many * (rank + 1) // world_size)

    def weight(self, world_size: int) -> float:
        """The factor for a micro-batch's mean loss before backward.

        Every rank sums the gradients of its share, and DDP and FSDP take the mean over ranks. With these weights the
        result is the gradient of the mean loss over all samples of the step.
        """
        return world_size / self.micro_batches

    def key(self, step: int, micro: int) -> int:
        """64 bits that seed everything random in a micro-batch (dropout), the same at any world size."""
        return key_of(self.seed, step, micro)

    def parts(self, step: int, rank: int, world_size: int) -> list[Micro]:
        """The micro-batches of `step` that `rank` computes, in order."""
        numbers = self._numbers(rank, world_size)
        return [
            Micro(
                number=micro,
                samples=() if micro < 0 else self.samples(step, micro),
                weight=0.0 if micro < 0 else self.weight(world_size),
                key=self.key(step, micro),
                is_last=index == len(numbers) - 1,
            )
            for index, micro in enumerate(numbers)
        ]

    def batches(self, rank: int, world_size: int, *, after: int = 0, until: int | None = None) -> BatchSampler:
        """This rank's micro-batches of the steps after `after`, as DataLoader's `batch_sampler`."""
        return BatchSampler(self, self._numbers(rank, world_size), after, until)

    def loaded(self, step: int, micro: int) -> range:
        """The positions that are loaded for a micro-batch: its own, or one of the step's last for a filler.

        Every rank must run the forward pass to join its collectives; the weight 0 removes its effect.
        """
        return self.span(step, micro) if micro >= 0 else self.span(step, self.micro_batches - 1)[:1]

    def steps(self, epochs: int) -> int:
        """The step that completes this many epochs."""
        return -(-epochs * self.size // self.global_batch)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of the first sample of `step`."""
        return self.span(step).start // self.size

    def _numbers(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The numbers of the micro-batches that `rank` computes, with -1 for each filler."""
        share = self.share(rank, world_size)
        most = -(-self.micro_batches // world_size) if self.even else 0
        return (*share, *[-1] * (most - len(share)))


class Samples(list[int]):
    """The ids of one micro-batch, with its step, number and key (`Order.key`).

    DataLoader passes this object unchanged to a dataset's `__getitems__`.
    """

    def __init__(self, ids: tuple[int, ...], step: int, micro: int, key: int) -> None:
        super().__init__(ids)
        self.step, self.micro, self.key = step, micro, key


class BatchSampler:
    """The micro-batches with the numbers `micros` of every step after `after`, up to `until` (None: endless).

    What DataLoader's workers have prefetched need not be saved: the next process begins after the last complete step,
    however far this process had prefetched. Every new iterator begins there again, so use one iterator for the whole
    run.
    """

    def __init__(self, order: Order, micros: tuple[int, ...], after: int, until: int | None) -> None:
        if after < 0:
            raise ValueError(f"step {after} cannot be complete; steps count from 1, and 0 means none")
        self.order, self.micros, self.after, self.until = order, micros, after, until

    def __iter__(self) -> Iterator[Samples]:
        steps = itertools.count(self.after + 1) if self.until is None else range(self.after + 1, self.until + 1)
        for step, micro in ((step, micro) for step in steps for micro in self.micros):
            ids = tuple(self.order.sample(position) for position in self.order.loaded(step, micro))
            yield Samples(ids, step, micro, self.order.key(step, micro))

    def __len__(self) -> int:
        if self.until is None:
            raise TypeError("the number of batches is not known; give batches() the last step as `until`")
        return max(0, self.until - self.after) * len(self.micros)


@functools.lru_cache(maxsize=64)
def key_of(*parts: int) -> int:
    """A 64-bit key that differs if any part differs; the same in every process and release of Python."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def permuted(index: int, count: int, key: int) -> int:
    """The position of `index` in the permutation of [0, count) that `key` selects."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, key)
        if index < count:
            return index


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ key ^ (number << 56)) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK_64
    return value ^ value >> 31


def fitting_micro_batch(global_batch: int, wanted: int) -> int:
    """The largest size of micro-batches up to `wanted` that divides `global_batch`."""
    return next(size for size in range(min(wanted, global_batch), 0, -1) if global_batch % size == 0)
