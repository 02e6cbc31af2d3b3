"""The part of torch that tests need: a tensor of a few integers."""

from __future__ import annotations

from collections.abc import Sequence


class Tensor:
    """A row of integers, or a single one. `values` is the row in both cases."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]

    def __int__(self) -> int:
        (only,) = self.values
        return only

    item = __int__


def tensor(data: int | Sequence[int]) -> Tensor:
    return Tensor([data] if isinstance(data, int) else data)
