"""What modules keep of the process that imports them, and how they find it out again in a worker."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from elaunch.agent.forkserver.hidden_modules import Gate
from elaunch.agent.forkserver.preload import Brought, _import

LIBRARY = """
import logging, os
def rank():
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        if name in os.environ and os.environ.get(name) is not None:
            return int(os.environ[name])
def only_zero(): pass
only_zero.rank = getattr(only_zero, "rank", rank() or 0)
log = logging.getLogger("of_the_library")
if not logging.getLogger().hasHandlers():
    log.addHandler(logging.StreamHandler())
    log.propagate = False
"""
NAME = "library_with_a_rank"


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Brought]:
    """The library as a fork server has imported it, which has no rank and no logging."""
    (tmp_path / f"{NAME}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    root, finders = logging.getLogger(), [*sys.meta_path]
    handlers, root.handlers = root.handlers, []
    importlib.invalidate_caches()
    yield _import(NAME, (NAME,), frozenset())
    root.handlers = handlers
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)
    log = logging.getLogger("of_the_library")
    log.propagate = True
    log.handlers.clear()


def imported(brought: Brought) -> ModuleType:
    """The module as a worker has it that is forked now."""
    Gate([brought])
    assert NAME not in sys.modules
    return importlib.import_module(NAME)


def test_a_lookup_of_the_rank_for_that_statement_does_not_count_and_no_other_variable_of_it(brought: Brought) -> None:
    assert not brought.looked_up & {"RANK", "LOCAL_RANK", "SLURM_PROCID"}
    assert list(brought.ranks) == [NAME]


def test_the_worker_has_the_rank_that_it_has_when_it_imports_the_module(
    brought: Brought, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")

    assert imported(brought).only_zero.rank == 3


def test_a_rank_that_the_program_has_given_stays(brought: Brought, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    Gate([brought])
    brought.modules[NAME].only_zero.rank = 5

    assert importlib.import_module(NAME).only_zero.rank == 5


@pytest.mark.parametrize("of_the_program", [(), (logging.NullHandler(),)])
def test_a_library_has_a_handler_of_its_own_only_where_the_program_has_set_up_no_logging(
    brought: Brought, monkeypatch: pytest.MonkeyPatch, of_the_program: tuple[logging.Handler, ...]
) -> None:
    # pytest adds handlers of its own.
    monkeypatch.setattr(logging.getLogger(), "handlers", [*of_the_program])

    log = imported(brought).log

    own = [each for each in log.handlers if type(each) is logging.StreamHandler]
    assert len(own) == (0 if of_the_program else 1)
    assert log.propagate == bool(of_the_program)


@pytest.mark.parametrize(
    "text",
    [
        "only_zero.rank = int(os.environ.get('RANK', 0))",
        "only_zero.number = getattr(only_zero, 'number', int(os.environ.get('RANK', 0)))",
        "if True:\n    only_zero.rank = getattr(only_zero, 'rank', int(os.environ.get('RANK', 0)))",
        "other.rank = getattr(only_zero, 'rank', int(os.environ.get('RANK', 0)))",
        "def keep():\n    only_zero.rank = getattr(only_zero, 'rank', int(os.environ.get('RANK', 0)))\nkeep()",
    ],
)
def test_any_other_way_to_keep_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "another_way.py").write_text(f"import os\ndef only_zero(): pass\nother = only_zero\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    try:
        brought = _import("another_way", ("another_way",), frozenset())
    finally:
        sys.modules.pop("another_way", None)

    assert "RANK" in brought.looked_up
    assert not brought.ranks
