"""Each worker's own ranks in preloaded modules, and which hidden modules come back when the program imports one."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from elaunch.agent.forkserver import after_fork
from elaunch.agent.forkserver.after_fork import HiddenModules
from elaunch.agent.forkserver.preload import Preloaded
from tests.harness import DEADLINE_S, wait_for

# As lightning.fabric.utilities.rank_zero and torchmetrics.utilities.prints do it.
LIGHTNING = """
import os
def _get_rank(): return int(os.environ["RANK"]) if "RANK" in os.environ else None
def rank_zero_only(): pass
rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)
"""
TORCHMETRICS = """
import os
def rank_zero_only(): pass
rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0)))
"""


def module(name: str, text: str = "") -> ModuleType:
    made = ModuleType(name)
    exec(text, vars(made))
    loader: Any = None
    made.__spec__ = ModuleSpec(name, loader)
    return made


def test_a_worker_knows_its_own_rank_in_modules_that_the_fork_server_has_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {"lightning.fabric.utilities.rank_zero": LIGHTNING, "torchmetrics.utilities.prints": TORCHMETRICS}
    modules = {name: module(name, text) for name, text in texts.items()}
    functions = [vars(each)["rank_zero_only"] for each in modules.values()]

    after_fork.forget_ranks(modules)
    forgotten = [hasattr(each, "rank") for each in functions]
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    after_fork.find_ranks(modules)

    assert forgotten == [False, False]
    assert [each.rank for each in functions] == [5, 1]


@pytest.mark.parametrize("is_set_up", [True, False])
def test_lightnings_own_log_handler_is_for_programs_that_have_set_up_no_logging(
    monkeypatch: pytest.MonkeyPatch, is_set_up: bool
) -> None:
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if is_set_up else [])

    after_fork.find_ranks({"lightning.pytorch": ModuleType("lightning.pytorch")})

    assert (len(logger.handlers), logger.propagate) == ((0, True) if is_set_up else (1, False))


PACKAGE, PART = "imported_by_two", "imported_by_two.part"
TEXT = f"import {PACKAGE}\n{PACKAGE}.runs = getattr({PACKAGE}, 'runs', 0) + 1\n"

# Whether a thread is to stop at an event of a frame, as `sys.settrace` reports it.
Place = Callable[[FrameType, str], bool]


class Importing:
    """A thread that imports the module `name`. With a `place`, it stops there until it is released."""

    def __init__(self, name: str, place: Place | None = None) -> None:
        self.module: ModuleType | None = None
        self.error: BaseException | None = None
        self._name, self._place = name, place
        self._there, self._released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if place:
            # From 3.14 on, Python itself waits until another thread has imported the package.
            wait_for(lambda: self._there.is_set() or self.waits_for_module(), "the thread at its place")

    def release(self) -> Importing:
        """Let the thread go on to its end."""
        self._released.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def waits_for_module(self) -> bool:
        """Whether the thread waits for another one's import."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame and (frame.f_code.co_name, frame.f_globals["__name__"]) != ("acquire", "importlib._bootstrap"):
            frame = frame.f_back
        return frame is not None

    def _run(self) -> None:
        sys.settrace(self._trace if self._place else None)
        try:
            self.module = importlib.import_module(self._name)
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self._place and self._place(frame, event):
            self._place = None
            self._there.set()
            self._released.wait(DEADLINE_S)
        return self._trace


def called(function: str) -> Place:
    return lambda frame, event: event == "call" and frame.f_code.co_name == function


def before_finders(frame: FrameType, event: str) -> bool:
    """Python has not found PART in sys.modules, and is going to call the finders."""
    return called("_find_spec")(frame, event) and frame.f_locals["name"] == PART


def after_find_spec(frame: FrameType, event: str) -> bool:
    """The finder has returned, and another thread may have Python's lock of imports again."""
    caller = frame.f_back
    is_unlocked = event == "return" and frame.f_code.co_name == "__exit__"
    return is_unlocked and caller is not None and isinstance(caller.f_locals.get("finder"), HiddenModules)


def test_the_first_import_puts_all_modules_back_but_numpys_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: None})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    names = ("numpy", "numpy.part", "heavy", "heavy.part", "other")
    finders, modules = [*sys.meta_path], {name: module(name) for name in names}
    for name, each in modules.items():
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setattr(modules["heavy"], "__getattr__", lambda _: 7, raising=False)

    HiddenModules(Preloaded(modules))
    seen = [{*names} & sys.modules.keys()]
    for name in ("numpy.part", "heavy.part"):
        assert importlib.import_module(name) is modules[name]
        seen.append({*names} & sys.modules.keys())

    assert seen == [set(), {"numpy", "numpy.part"}, {*names}]
    assert sys.meta_path == finders


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """A package with a module, imported and hidden. The package counts how often the module has run."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "part.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = {name: importlib.import_module(name) for name in (PACKAGE, PART)}
    HiddenModules(Preloaded(modules))
    yield modules
    for name in modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", [before_finders, after_find_spec])
def test_a_module_that_one_thread_imports_while_another_one_puts_its_package_back_does_not_run_again(
    hidden: dict[str, ModuleType], place: Place
) -> None:
    specs = {name: module.__spec__ for name, module in hidden.items()}
    package = Importing(PACKAGE, called("exec_module"))
    part = Importing(PART, place)

    package.release()
    part.release()

    assert (package.error, part.error) == (None, None)
    assert (package.module, part.module) == tuple(hidden.values())
    assert vars(hidden[PACKAGE])["runs"] == 1
    assert {name: sys.modules[name] for name in hidden} == hidden
    assert {name: module.__spec__ for name, module in hidden.items()} == specs


def test_a_thread_has_a_package_only_once_its_variables_are_applied(hidden: dict[str, ModuleType]) -> None:
    first = Importing(PACKAGE, called("apply"))
    second = Importing(PACKAGE)

    wait_for(lambda: second.is_over() or second.waits_for_module(), "the second thread has the package, or waits")
    has_package = second.is_over()
    first.release()
    second.release()

    assert not has_package
    assert first.module is second.module is hidden[PACKAGE]
