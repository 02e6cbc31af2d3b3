"""records: equal, hashed and shown as the standard library's dataclasses are."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

import pytest

from elaunch import records


class Given(dict[str, Any]):
    """The arguments of `field`."""


def both(*, frozen: bool = True, kw_only: bool = False, **members: Any) -> tuple[Any, Any]:
    """The standard library's class of these members, and a class of records."""
    made = []
    for kind in (dataclasses, records):
        own = {name: kind.field(**each) if isinstance(each, Given) else each for name, each in members.items()}
        pair = type("Pair", (), {**own, "__annotations__": dict(members["types"])})
        made.append(kind.dataclass(frozen=frozen, kw_only=kw_only)(pair))
    return made[0], made[1]


FIELDS = {"left": int, "right": str, "secret": str, "note": str}
PAIRS = both(
    types=FIELDS,
    right="r",
    secret=Given(default="", repr=False),
    note=Given(default="", compare=False),
    total=cached_property(lambda self: self.left + 1),
)


@pytest.mark.parametrize("made", [(1,), (1, "x"), (1, "x", "hidden"), (2, "r", "", "a note")], ids=str)
def test_a_record_is_shown_and_hashed_as_a_dataclass_is(made: tuple[Any, ...]) -> None:
    theirs, ours = (pair(*made) for pair in PAIRS)

    assert repr(ours).split(".")[-1] == repr(theirs).split(".")[-1]
    assert "hidden" not in repr(ours)
    assert hash(ours) == hash(theirs)
    assert ours.__match_args__ == theirs.__match_args__


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
    assert records.replace(record, left=2) == PAIRS[1](2)
    with pytest.raises(TypeError):
        records.replace(record, other=2)


def test_a_record_that_is_not_frozen_can_be_changed_and_has_no_hash() -> None:
    for pair in both(frozen=False, types={"left": int, "more": list}, more=Given(default_factory=list)):
        record = pair(1)
        record.left = 2

        assert (record == pair(2), record.more) == (True, [])
        with pytest.raises(TypeError):
            hash(record)


def test_the_standard_library_takes_a_record_for_one_of_its_own() -> None:
    theirs, ours = (pair(1, "x", "hidden") for pair in PAIRS)

    assert dataclasses.is_dataclass(ours)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs) == records.asdict(ours)
    assert dataclasses.replace(ours, left=2) == PAIRS[1](2, "x", "hidden")
    for here, there in zip(dataclasses.fields(ours), dataclasses.fields(theirs), strict=True):
        assert (here.name, here.type, here.default) == (there.name, there.type, there.default)
        assert (here.repr, here.compare, here.kw_only) == (there.repr, there.compare, there.kw_only)


def test_records_inside_of_tuples_lists_and_dicts_become_dictionaries() -> None:
    class Named(NamedTuple):
        inner: object

    for kind, pair in zip((dataclasses, records), both(types={"left": object}), strict=True):
        inner = pair(1)
        outer = pair([inner, (inner, "x"), {"a": inner}, Named(inner)])

        plain = {"left": 1}
        assert kind.asdict(outer) == {"left": [plain, (plain, "x"), {"a": plain}, (plain,)]}
        assert isinstance(kind.asdict(outer)["left"][3], Named)


def test_what_a_record_cannot_have_is_refused_where_its_class_is_defined() -> None:
    for types, default in (
        ({"left": "ClassVar[int]"}, 0),
        ({"left": list}, []),
        ({"left": int}, dataclasses.field(default=1)),
    ):
        with pytest.raises(AssertionError):
            records.dataclass(type("Pair", (), {"left": default, "__annotations__": types}))


@pytest.mark.parametrize("kind", ["records", "dataclasses"])
def test_fields_by_keyword_alone(kind: str) -> None:
    pair = both(kw_only=True, types={"left": int, "right": str}, left=1)[kind == "records"]

    assert vars(pair(right="x")) == {"left": 1, "right": "x"}
    assert pair.__match_args__ == ()
    with pytest.raises(TypeError):
        pair(1, "x")


def test_a_record_without_fields_and_one_with_a_method_of_its_own() -> None:
    empty = both(types={})[1]
    own = both(types={"left": int}, __repr__=lambda self: f"own {self.left}", __eq__=lambda self, other: True)[1]

    assert (empty() == empty(), hash(empty()) == hash(())) == (True, True)
    assert (repr(own(1)), own(1) == own(2), hash(own(1)) == hash(own(1))) == ("own 1", True, True)


def test_a_record_is_made_as_a_dataclass_is() -> None:
    members = {
        "types": {"left": int, "right": str, "more": list, "total": int},
        "right": "r",
        "more": Given(default_factory=lambda: [1]),
        "total": Given(default=0, kw_only=True),
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


def test_the_first_records_of_a_class_and_those_after_are_made_alike() -> None:
    """The first ones are filled in, the others are made by a compiled `__init__`."""
    made = []

    def noted(self: Any) -> None:
        made.append(self.left)

    kinds = {"left": int, "right": str, "more": list}
    parts: dict[str, Any] = {"right": Given(default="r", kw_only=True), "more": Given(default_factory=list)}
    for pair in both(types=kinds, __post_init__=noted, **parts):
        several = [pair(1, right=str(number % 2)) for number in range(30)]

        assert [each.right for each in several] == ["0", "1"] * 15
        assert len({id(each.more) for each in several}) == 30
        assert several[0] == several[28]
        for wrong in ((1, [], "r"), ()):
            with pytest.raises(TypeError):
                pair(*wrong)
        with pytest.raises(TypeError):
            pair(1, other=2)
        with pytest.raises(TypeError):
            pair(1, left=2)
    assert made == [1] * 60


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, "x", 2), {}), ((1,), {"left": 1}), ((1,), {"other": 1})], ids=str
)
def test_wrong_arguments_of_the_first_record_are_named_as_the_standard_library_names_them(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    said = []
    for pair in both(types={"left": int, "right": str}, right="r"):
        with pytest.raises(TypeError) as caught:
            pair(*args, **kwargs)
        said.append(str(caught.value).split("__init__")[-1])

    assert said[0] == said[1]
