"""Which variables a preloaded module keeps, and which its functions look up whenever they are called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from elaunch.agent.forkserver.preload import Brought, _recorded

EARLY = """
import functools, os
AT_IMPORT = os.environ.get("OF_ITS_OWN")
def inside(): return os.getenv("IN_A_FUNCTION")
def given(name): return os.environ.get(name)
def own(): return given("OF_ITS_OWN_FUNCTION")
OWN = own()
@functools.cache
def cached(): return os.environ.get("CACHED")
def stored():
    global STORED
    STORED = os.environ.get("STORED")
"""
LATE = """
import os.path, early_one
early_one.inside()
early_one.cached()
early_one.stored()
IN_A_LIST = [early_one.given(name) for name in ("ONE_OF_TWO", "TWO_OF_TWO")]
class Settings: GIVEN = early_one.given("GIVEN")
early_one.given("".join(("COM", "PUTED")))
ALL = [*os.environ.items(), *os.environ.values(), os.environ.copy(), dict(os.environ), {**os.environ}]
BOTH = dict(os.environ); os.environ.get('FROM_LATE')
os.path.expandvars("$EXPANDED") and os.environ.get("FROM_LATE")
"""


def test_a_variable_is_kept_by_the_module_that_names_it_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "early_one.py").write_text(EARLY)
    (tmp_path / "late_one.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONE_OF_MANY", "1")
    brought = Brought("late_one")

    try:
        with _recorded(brought, frozenset()):
            importlib.import_module("late_one")
    finally:
        for name in ("early_one", "late_one"):
            sys.modules.pop(name, None)

    early, late = {"early_one"}, {"late_one"}
    kept = {name: modules for name, modules in brought.readers.items() if modules & (early | late)}
    assert kept == {
        **dict.fromkeys(("OF_ITS_OWN", "OF_ITS_OWN_FUNCTION", "CACHED", "STORED", "COMPUTED"), early),
        **dict.fromkeys(("ONE_OF_TWO", "TWO_OF_TWO", "GIVEN", "FROM_LATE", "EXPANDED"), late),
    }
    # The variables of a rank count, whoever looks them up.
    assert {*kept, "IN_A_FUNCTION"} <= brought.looked_up
