"""A program that a test runs to its end has a time limit, and what a test forks ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Programs that tests run with a limit. Their own children are a part of what is tested.
PROGRAMS = {"rank_forker.py", "e2e/fidelity/probe.py", "faults/surviving.py"}
RUN = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}


def calls(code: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call in a file, with the name of what it calls."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def without_limit(code: str) -> list[int]:
    """The lines at which a file runs a program without a time limit."""
    return [
        call.lineno for name, call in calls(code) if name in RUN and "timeout" not in {k.arg for k in call.keywords}
    ]


def forking(code: str) -> list[int]:
    """The lines at which a file forks."""
    return [call.lineno for name, call in calls(code) if name in ("os.fork", "os.forkpty")]


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The code of all tests, by path. Without the programs in `corpus`."""
    paths = sorted(path for path in TESTS.rglob("*.py") if "corpus" not in path.parts)
    found = {str(path.relative_to(TESTS)): path.read_text() for path in paths}
    assert found.keys() > PROGRAMS
    return {path: code for path, code in found.items() if path not in PROGRAMS}


def test_a_call_without_a_limit_and_a_fork_are_found() -> None:
    code = "subprocess.run(a, timeout=3)\nsubprocess.run(\n  a)\nos.fork()\nhere = 'os.fork()'\n"

    assert without_limit(code) == [2]
    assert forking(code) == [4]


def test_each_program_that_a_test_runs_to_its_end_has_a_time_limit(files: dict[str, str]) -> None:
    found = {path: lines for path, code in files.items() if (lines := without_limit(code))}

    assert not found, "give subprocess.run(…) a timeout, as RUN_LIMIT_S"


def test_tests_fork_by_child_alone(files: dict[str, str]) -> None:
    found = {path for path, code in files.items() if forking(code)}

    assert found == {"forked.py"}, "use tests.forked.Child: it ends its process, and is waited for with a limit"
