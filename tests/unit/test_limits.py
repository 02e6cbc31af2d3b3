"""Each wait of a test has a time limit of its own, and what a test forks ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Programs that tests run with a limit. Their own children and waits are a part of what is tested.
PROGRAMS = {"rank_forker.py", "e2e/fidelity/probe.py", "ecosystem/programs/dcp.py"}
RUN = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
# Methods that wait without a limit if they get no argument.
WAITS = {"get", "join", "result"}
# What has a `wait` without a limit. Job.wait() and others of tests and of elaunch have one.
WAITED_FOR = ("subprocess.Popen", "threading.Barrier", "threading.Event")


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


def waited_for(tree: ast.AST) -> set[str]:
    """What a file gives or annotates as a process, an event or a barrier, by the name that it has there."""
    made = set(WAITED_FOR)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.returns and _is_waited_for(node.returns):
            made.add(node.name)
        elif isinstance(node, ast.arg) and node.annotation and _is_waited_for(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _is_waited_for(node.annotation):
            found.add(ast.unparse(node.target))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _called(node.value) in made:
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.withitem) and node.optional_vars and _called(node.context_expr) in made:
            found.add(ast.unparse(node.optional_vars))
    return found


def _is_waited_for(annotation: ast.expr) -> bool:
    return any(kind in ast.unparse(annotation) for kind in WAITED_FOR)


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def endless(code: str) -> list[int]:
    """The lines at which a file waits without a time limit for a process, a thread, a queue or an event."""
    tree = ast.parse(code)
    names = waited_for(tree)
    found: list[int] = []
    for name, call in calls(code):
        of, _, method = name.rpartition(".")
        given = call.args + [keyword.value for keyword in call.keywords]
        if (
            (method in WAITS and of and not given)
            or (method == "wait" and not given and (of in names or of.endswith("process")))
            or (method == "communicate" and len(call.args) < 2 and "timeout" not in {k.arg for k in call.keywords})
            or (method == "acquire" and not given)
            or (name == "os.waitpid" and "WNOHANG" not in ast.unparse(call.args[1]))
        ):
            found.append(call.lineno)
    return sorted(found)


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


WAITING = """
def started(done: threading.Event, job: Job) -> subprocess.Popen[str]:
    done.wait()
    done.wait(3)
    job.wait()
process = started(event, job)
process.communicate()
process.communicate("text", timeout=3)
with subprocess.Popen(words) as child:
    child.wait()
self.process.wait()
thread.join()
"".join(words)
queue.get()
values.get("name")
future.result()
lock.acquire()
lock.acquire(timeout=3)
os.waitpid(pid, 0)
os.waitpid(pid, os.WNOHANG)
"""


def test_a_wait_without_a_limit_is_found() -> None:
    lines = WAITING.splitlines()

    assert [lines[line - 1].strip() for line in endless(WAITING)] == [
        *("done.wait()", "process.communicate()", "child.wait()", "self.process.wait()", "thread.join()"),
        *("queue.get()", "future.result()", "lock.acquire()", "os.waitpid(pid, 0)"),
    ]


def test_each_wait_of_a_test_has_a_time_limit(files: dict[str, str]) -> None:
    found = {path: lines for path, code in files.items() if (lines := endless(code))}

    assert not found, "give it a limit, as .wait(DEADLINE_S); the end of a thread: tests.harness.joined(thread)"


def test_each_program_that_a_test_runs_to_its_end_has_a_time_limit(files: dict[str, str]) -> None:
    found = {path: lines for path, code in files.items() if (lines := without_limit(code))}

    assert not found, "give subprocess.run(…) a timeout, as RUN_LIMIT_S"


def test_tests_fork_by_child_alone(files: dict[str, str]) -> None:
    found = {path for path, code in files.items() if forking(code)}

    assert found == {"forked.py"}, "use tests.forked.Child: it ends its process, and is waited for with a limit"
