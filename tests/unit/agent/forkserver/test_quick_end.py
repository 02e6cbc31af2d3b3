"""What a worker that has lost a peer leaves to the kernel, and what not."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elaunch.agent.forkserver import quick_end
from elaunch.agent.forkserver.quick_end import QuickEnd


def _del_library() -> None:
    """Stands for torch's function of that name."""


def mine() -> None:
    """The program's own."""


def of_program() -> Iterator[None]:
    """A generator of the program."""
    yield


class Kept:
    """Has a finalizer."""


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> QuickEnd:
    """Of a worker that has torch."""
    monkeypatch.setitem(sys.modules, "torch.library", ModuleType("torch.library"))
    monkeypatch.setattr(_del_library, "__module__", "torch.library")
    monkeypatch.setattr(quick_end, "atexit", SimpleNamespace(_ncallbacks=lambda: 0, register=lambda _: None))
    end = QuickEnd()
    monkeypatch.setattr(end, "_pid", os.getpid())
    return end


@pytest.mark.parametrize("has_lost_peer", [True, False])
def test_torchs_operators_stay_in_their_table_only_after_a_lost_peer(
    end: QuickEnd, monkeypatch: pytest.MonkeyPatch, has_lost_peer: bool
) -> None:
    kept = Kept()
    # A partial function has no name.
    unnamed = weakref.finalize(kept, partial(mine))
    of_torch, own = weakref.finalize(kept, _del_library), weakref.finalize(kept, mine)
    monkeypatch.setattr(end, "_has_lost_peer", lambda: has_lost_peer)

    end._keep_operators()

    assert of_torch.atexit != has_lost_peer
    assert own.atexit
    assert unnamed.atexit


def test_a_child_that_the_program_has_forked_ends_as_ever(end: QuickEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    of_torch = weakref.finalize(kept, _del_library)
    monkeypatch.setattr(end, "_has_lost_peer", lambda: True)
    monkeypatch.setattr(end, "_pid", os.getpid() + 1)

    end._keep_operators()

    assert of_torch.atexit


def test_lightnings_default_profiler_writes_nothing_at_its_end_and_one_that_is_made_from_it_may() -> None:
    def close(_: object) -> None:
        pass

    base = type("Profiler", (), {"__del__": close, "__module__": "lightning.pytorch.profilers.profiler"})
    default = type("PassThroughProfiler", (base,), {"__module__": "lightning.pytorch.profilers.base"})
    users = type("Mine", (default,), {"__module__": "__main__"})

    assert not quick_end._writes_at_end(default)
    assert quick_end._writes_at_end(users)
    assert quick_end._writes_at_end(base)


def test_a_generator_that_traceback_has_left_behind_does_nothing_at_its_end_and_any_other_of_python_may() -> None:
    assert not quick_end._may_go_on(traceback.walk_stack(None))  # type: ignore[arg-type]
    assert quick_end._may_go_on(of_program())  # type: ignore[arg-type]
    # `os.walk` stands for those of Python that have a `finally`.
    assert quick_end._may_go_on(os.walk("."))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_suspended", [True, False], ids=["suspended", "ended"])
def test_files_are_flushed_whatever_the_generators_before_them_and_only_one_that_has_not_ended_may_write_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_suspended: bool
) -> None:
    generator = of_program()
    next(generator)
    if not is_suspended:
        assert [*generator] == []
    path = tmp_path / "written"

    with path.open("w") as file:
        file.write("data")
        monkeypatch.setattr(quick_end, "gc", SimpleNamespace(get_objects=lambda: [generator, file]))
        is_quiet = quick_end._flush_files()

        assert path.read_text() == "data"
    assert is_quiet != is_suspended
