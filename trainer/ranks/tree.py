"""The tree along which ranks collect and spread small values: rank 0 is its root.

A rank's parent has the same number in base 8 with its last digit that is not 0 set to 0. So the ranks below a rank are
the ones that follow it, and with 8 ranks per node 7 of 8 connections stay within a node.
"""

from __future__ import annotations

# With 16,384 ranks the depth is 5 and rank 0 has 31 children. A smaller number makes the tree deeper, which
# takes longer; a larger one lets more ranks wait for the root.
FAN_OUT = 8


def parent(rank: int) -> int | None:
    """None for rank 0."""
    if not rank:
        return None
    unit = _unit(rank)
    return rank - rank // unit % FAN_OUT * unit


def children(rank: int, world_size: int) -> list[int]:
    """In ascending order. The ranks below a child are it and those that follow it, up to the next child."""
    unit = 1
    found: list[int] = []
    while rank + unit < world_size and (not rank or unit < _unit(rank)):
        found += range(rank + unit, min(rank + FAN_OUT * unit, world_size), unit)
        unit *= FAN_OUT
    return found


def below(rank: int, world_size: int) -> range:
    """The rank itself, and all ranks that get rank 0's messages through it."""
    return range(rank, min(rank + _unit(rank), world_size) if rank else world_size)


def _unit(rank: int) -> int:
    """The power of FAN_OUT of the last digit that is not 0."""
    unit = 1
    while not rank // unit % FAN_OUT:
        unit *= FAN_OUT
    return unit
