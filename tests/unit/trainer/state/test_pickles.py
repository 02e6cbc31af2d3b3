"""Files of torch.save that nest too deeply are refused; all others are read. Skeletons give no type a state."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elaunch.trainer.state.packing import pack_plain, unpack_plain
from elaunch.trainer.state.pickles import DEPTH_MAX, require_shallow, require_shallow_value, scan
from elaunch.trainer.state.tree import Tree
from tests.fuzzing import bounded
from tests.unit.trainer.test_fuzz import unpacked

VALUES: list[Any] = [
    None,
    [1, -1, 1 << 40, 1.5, "text", b"bytes", True, 2 + 1j],
    {"a": (1, (2, (3,))), 7: [[], {}, ()]},
    {1, 2},
    Counter({(1, 2): 3}),
    OrderedDict(a=torch.ones(3)),
    torch.Size([1, 2]),
    torch.bfloat16,
    torch.device("cpu"),
    [(i, str(i)) for i in range(3000)],
]


def saved(value: object, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_torch_saves_is_scanned_to_its_end(value: object) -> None:
    file = saved([value] * 2)

    content = torch._C.PyTorchFileReader(file).get_record("data.pkl")
    file.seek(0)
    require_shallow(file)

    assert file.tell() == 0
    scan(content)


def nested(depth: int, around: Callable[[Any], Any]) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = around(value)
    return value


PAIR_OF_PAIRS = nested(60, lambda value: (value, value))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + b")" + b"\x85" * 3_000_000 + b".",
        b"\x80\x02" + b"(" * 600 + b"t" * 600 + b".",
        b"\x80\x02" + b")q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b".",
        b"\x80\x02)" + b"q\x000h\x00\x85" * 1000,
        b"\x80\x02}X\xff\xff\xff\xff",
        b"\x80\x02t.",
        b"\x80\x02\x86.",
        b"cno line",
        b"",
        b"\x93",
    ],
    ids=["tuples", "marked", "doubled", "by memory", "text", "no mark", "nothing", "line", "empty", "instruction"],
)
def test_a_pickle_that_nests_too_deeply_or_is_none_is_refused(content: bytes) -> None:
    with bounded(cpu_s=20), pytest.raises(pickle.UnpicklingError):
        scan(content)


@pytest.mark.parametrize("value", [PAIR_OF_PAIRS, {"a": PAIR_OF_PAIRS}], ids=["pairs", "in a dictionary"])
def test_plain_values_that_are_in_too_many_places_are_refused(value: Any) -> None:
    packed = pack_plain(Tree({}, {}, value, {}))

    with bounded(), pytest.raises(pickle.UnpicklingError, match="too many places"):
        unpack_plain(packed)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (nested(DEPTH_MAX + 10, lambda value: [value]), "nests"),
        (nested(20_000, lambda value: (value,)), "nests"),
        ([[0] * 50] * 300, "too many places"),
    ],
    ids=["lists", "tuples", "many"],
)
def test_values_that_nest_too_deeply_are_refused(value: Any, why: str) -> None:
    with bounded(), pytest.raises(pickle.UnpicklingError, match=why):
        require_shallow_value(value, 10_000)


@pytest.mark.parametrize("name", [("collections", "Counter"), ("collections", "OrderedDict"), ("torch", "Size")])
@pytest.mark.parametrize("state", [b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x01\x00\x00\x00aK\x01s\x86"])
def test_a_skeleton_gives_no_type_a_state(name: tuple[str, str], state: bytes) -> None:
    skeleton = b"\x80\x02c" + "\n".join(name).encode() + b"\n" + state + b"b."

    with pytest.raises(pickle.UnpicklingError):
        unpacked(skeleton)

    assert not hasattr(Counter, "a")
