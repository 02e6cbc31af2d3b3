"""Which hidden modules come back when the program imports one of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from elaunch.agent.forkserver.hidden_modules import Gate
from elaunch.agent.forkserver.preload import Brought

NAMES = ("base_of_it", "user_of_it", "after_it")


def brought(name: str) -> Brought:
    module = ModuleType(name)
    loader: Any = None
    module.__spec__ = ModuleSpec(name, loader)
    sys.modules[name] = module
    return Brought(name, {name: module}, is_package=True)


@pytest.fixture
def packages() -> Iterator[None]:
    """A gate that hides three packages that were imported in this order."""
    finders = [*sys.meta_path]
    Gate([brought(name) for name in NAMES])
    yield
    sys.meta_path[:] = finders
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("packages")
def test_what_a_package_has_imported_comes_back_with_it_and_what_came_later_does_not() -> None:
    """`typing.get_type_hints` looks into sys.modules for the module of each base class."""
    assert not {*NAMES} & sys.modules.keys()

    importlib.import_module("user_of_it")

    assert {*NAMES} & sys.modules.keys() == {"base_of_it", "user_of_it"}


@pytest.mark.parametrize("answer", [None, 7])
def test_a_package_that_answers_each_name_is_hidden_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    package, child = ModuleType("answers"), ModuleType("answers.child")
    package.__path__ = []
    package.__dict__["__getattr__"] = lambda _: answer
    loader: Any = None
    for module in (package, child):
        module.__spec__ = ModuleSpec(module.__name__, loader)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    Gate([Brought("answers", {"answers": package, "answers.child": child}, is_package=True)])
    assert "answers.child" not in sys.modules

    assert importlib.import_module("answers.child") is child
