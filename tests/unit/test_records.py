"""records: equal, hashed and shown as the standard library's dataclasses are."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import pytest

from elaunch import records


def both(**members: Any) -> tuple[Any, Any]:
    """A class of records, and the standard library's of the same members."""
    theirs, ours = (type("Pair", (), {**members, "__annotations__": dict(members["types"])}) for _ in range(2))
    return dataclasses.dataclass(frozen=True)(theirs), records.dataclass(frozen=True)(ours)


FIELDS = {"left": int, "right": str, "secret": str, "note": str}
PAIRS = both(
    types=FIELDS,
    right="r",
    secret=dataclasses.field(default="", repr=False),
    note=dataclasses.field(default="", compare=False),
    total=cached_property(lambda self: self.left + 1),
)


@pytest.mark.parametrize("made", [(1,), (1, "x"), (1, "x", "hidden"), (2, "r", "", "a note")], ids=str)
def test_a_record_is_shown_and_hashed_as_a_dataclass_is(made: tuple[Any, ...]) -> None:
    theirs, ours = (pair(*made) for pair in PAIRS)

    assert repr(ours).split(".")[-1] == repr(theirs).split(".")[-1]
    assert "hidden" not in repr(ours)
    assert hash(ours) == hash(theirs)
    assert [field.name for field in dataclasses.fields(ours)] == list(FIELDS)


@pytest.mark.parametrize(
    "others", [((1, "x"), (1, "x")), ((1, "x"), (2, "x")), ((1, "x", "s"), (1, "x", "t")), ((1, "r", "", "a"), (1,))]
)
def test_records_are_equal_where_dataclasses_are(others: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    theirs, ours = ([pair(*made) for made in others] for pair in PAIRS)
    for one, _ in (theirs, ours):
        # A value that is kept beside the fields is none of them.
        assert one.total == 2

    assert (ours[0] == ours[1]) == (theirs[0] == theirs[1])
    assert ours[0] != theirs[0]


def test_a_record_cannot_be_changed_but_replaced() -> None:
    record = PAIRS[1](1)

    with pytest.raises(dataclasses.FrozenInstanceError):
        record.left = 2
    assert dataclasses.replace(record, left=2) == PAIRS[1](2)


def test_a_record_without_fields_and_one_with_a_method_of_its_own() -> None:
    empty = both(types={})[1]
    own = both(types={"left": int}, __repr__=lambda self: f"own {self.left}", __eq__=lambda self, other: True)[1]

    assert (empty() == empty(), hash(empty()) == hash(())) == (True, True)
    assert (repr(own(1)), own(1) == own(2), hash(own(1)) == hash(own(1))) == ("own 1", True, True)


def test_a_record_is_made_as_a_dataclass_is() -> None:
    members = {
        "types": {"left": int, "right": str, "more": list, "total": int},
        "right": "r",
        "more": dataclasses.field(default_factory=lambda: [1]),
        "total": dataclasses.field(default=0, kw_only=True),
        "__post_init__": lambda self: self.more.append(self.left),
    }
    theirs, ours = both(**members)

    for args, named in (((1,), {}), ((1, "x", []), {"total": 3}), ((), {"left": 2, "more": [0]})):
        assert vars(ours(*args, **named)) == vars(theirs(*args, **named))
    assert ours(1).more is not ours(1).more
    for args, named in (((), {}), ((1, "x", [], 3), {}), ((1,), {"other": 1}), ((1,), {"left": 1})):
        for made in (theirs, ours):
            with pytest.raises(TypeError):
                made(*args, **named)


def test_a_record_that_extends_a_record_is_made_by_its_own_fields() -> None:
    first = both(types={"left": int})[1]
    second = records.dataclass(frozen=True)(type("Second", (first,), {"__annotations__": {"right": str}}))

    assert vars(second(1, "x")) == {"left": 1, "right": "x"}
    assert vars(first(1)) == {"left": 1}
    assert vars(type("Plain", (first,), {})(2)) == {"left": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        del first(1).left
