"""Of torch: a few integers in a row."""

from __future__ import annotations

from collections.abc import Sequence


class Tensor:
    """Integers, or one of them; `values` is the row in both cases."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]

    def __int__(self) -> int:
        (only,) = self.values
        return only


def tensor(data: int | Sequence[int]) -> Tensor:
    return Tensor([data] if isinstance(data, int) else data)
