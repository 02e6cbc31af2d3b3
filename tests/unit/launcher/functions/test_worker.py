"""A call and its value as pickles in files."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from elaunch.launcher.functions.worker import read_call, read_value, write_call, write_value


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
def like_before() -> Iterator[None]:
    """`read_call` makes its process like another one."""
    path, argv, main = sys.path, sys.argv, sys.modules["__main__"]
    yield
    sys.path, sys.argv, sys.modules["__main__"] = path, argv, main


def value(written: object, generation: int = 0) -> Any:
    file = io.BytesIO()
    pickle.dump((3, 0), file)
    write_value(file, written)
    return read_value(file, generation, "train")


@pytest.mark.usefixtures("like_before")
def test_a_function_of_a_module_is_sent_by_its_name() -> None:
    file = io.BytesIO()

    write_call(file, add, (1,), {"b": 2})

    assert b"test_worker" in file.getvalue()
    # Nothing of the main module is in it, so it is not run again.
    assert b"init_main" not in file.getvalue()
    file.seek(0)
    function, args, named = read_call(file)
    assert function(*args, **named) == 3


def test_a_function_of_a_notebook_without_cloudpickle_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ModuleType("__main__")
    exec("def train(): return 1", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    with pytest.raises(pickle.PicklingError, match=r"train .* defined in a notebook.*; pip install cloudpickle, or"):
        write_call(io.BytesIO(), notebook.train, (), {})


@pytest.mark.parametrize("returned", [None, {"loss": [0.5]}])
def test_a_value_comes_back_with_its_rank(returned: object) -> None:
    assert value(returned) == (3, returned)


def test_a_value_that_cannot_be_pickled_is_an_error_for_the_caller_and_not_for_the_rank() -> None:
    with pytest.raises(pickle.PicklingError, match=r"train returned on rank 3 a lock, which cannot be pickled \(Type"):
        value(threading.Lock())


def test_a_rank_that_ended_without_returning_is_named() -> None:
    file = io.BytesIO()
    pickle.dump((3, 0), file)

    with pytest.raises(EOFError, match=r"rank 3 ended with exit code 0 before train returned"):
        read_value(file, 0, "train")
