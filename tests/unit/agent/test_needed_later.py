"""agent.needed_later: a start imports no rule that only a failure needs; a run of some seconds has them all."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent import needed_later
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.output.timeline import Timeline
from elaunch.agent.workers.group import CurrentGroup
from elaunch.agent.workers.observers import Observers
from elaunch.agent.workers.reporter import Reporter
from elaunch.rendezvous.types import Failure, FailureKind
from tests.harness import DEADLINE_S, RUN_LIMIT_S

REPOSITORY = Path(__file__).parents[3]
# Imported inside of functions too, but at once, in the runs and processes that need it.
AT_ONCE = (
    "elaunch.agent.core.announcements",
    "elaunch.agent.forkserver",
    "elaunch.agent.metrics",
    "elaunch.agent.output.event_hook",
    "elaunch.rendezvous.etcd.grpc_transport",
)
PROGRAM = """
import json, sys
import elaunch.agent.run, elaunch.agent.loop
from elaunch.agent import needed_later
def loaded(): return [name for name in sys.modules if name.startswith("elaunch") or name == "statistics"]
start = loaded()
needed_later.import_all()
print(json.dumps([start, loaded()]))
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[set[str], set[str]]:
    """The modules of an agent at its start, and once its workers run."""
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
    ).stdout
    start, later = json.loads(said)
    return set(start), set(later)


def late_imports(path: Path) -> Iterator[str]:
    """The modules of elaunch that a file imports inside of functions. `from package import module` names both."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elaunch"):
                    modules = [f"{node.module}.{alias.name}" for alias in node.names]
                    files = [name for name in modules if (REPOSITORY / f"src/{name.replace('.', '/')}.py").is_file()]
                    yield from files or [str(node.module)]


def test_a_start_imports_no_rule_of_hangs_and_causes_and_no_answers(loaded: tuple[set[str], set[str]]) -> None:
    start, _ = loaded

    assert not start & {*needed_later.MODULES, "elaunch.agent.core.standstill", "elaunch.rendezvous.rules.hanging"}
    assert not {name for name in start if name.startswith("elaunch.agent.core.causes")}
    # The library for medians takes as long as ten modules of ours.
    assert "statistics" not in start


def test_an_agent_whose_workers_run_has_all_that_it_imports_late(loaded: tuple[set[str], set[str]]) -> None:
    _, later = loaded
    rooms = [REPOSITORY / room for room in ("agent", "rendezvous/etcd", "rendezvous/http", "rendezvous/rules")]
    late = {name for room in rooms for path in room.rglob("*.py") for name in late_imports(path)}

    missing = {name for name in late - later if not name.startswith(AT_ONCE)}

    assert "elaunch.agent.core.explain" in late
    assert missing == set()


def test_all_of_it_is_imported_a_second_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = threading.Event()
    monkeypatch.setattr(needed_later, "import_all", imported.set)
    said: list[str] = []
    reporter = Reporter(lambda _: None, lambda *_: None, Timeline(None, said.append, lambda _: None), no_failure)
    # Also where nothing looks for hangs.
    observers = Observers(CurrentGroup(), reporter, RunDir(None, "job", said.append), 0.0, lambda _: None)

    before_s = time.monotonic()
    observers.begin()
    after_s, due_s = time.monotonic(), observers.due_s
    observers.tick(before_s)
    was_early = imported.is_set()
    assert due_s is not None
    observers.tick(due_s)

    assert not was_early
    assert before_s < due_s < after_s + 5.0
    assert imported.wait(DEADLINE_S)


def no_failure(kind: FailureKind, generation: int, message: str) -> Failure:
    raise AssertionError((kind, generation, message))
