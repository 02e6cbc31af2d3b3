"""Which windows of the text a step trains on: a pure function of the seed and the step.

Every window is drawn once per epoch. An epoch's order is a pseudo-random permutation that is computed per index, in
constant memory: a Feistel network over the next even number of bits, walked until it lands inside (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4
_MASK_64 = 2**64 - 1


def key_of(*parts: int) -> int:
    """A 64-bit key that differs wherever any part differs; the same in every process and release of Python."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def windows_of_step(step: int, *, seed: int, global_batch: int, windows: int) -> list[int]:
    """The `global_batch` window numbers, each in [0, windows), of step 1, 2, …

    The world size has no say: consecutive steps walk through the epoch, whoever computes them.
    """
    first = (step - 1) * global_batch
    return [_draw(sample, seed, windows) for sample in range(first, first + global_batch)]


def share_of(drawn: list[int], rank: int, world_size: int) -> list[int]:
    """The contiguous part of a global batch that `rank` computes; `world_size` must divide its length."""
    size = len(drawn) // world_size
    return drawn[rank * size : (rank + 1) * size]


def permuted(index: int, count: int, key: int) -> int:
    """Where `index` stands in the permutation of [0, count) that `key` names."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, key)
        if index < count:
            return index


def _draw(sample: int, seed: int, windows: int) -> int:
    epoch, position = divmod(sample, windows)
    return permuted(position, windows, key_of(seed, epoch))


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ key ^ (number << 56)) & mask)
    return left << half_bits | right


def _mix(word: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK_64
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK_64
    return word ^ word >> 31
