"""--debug and --debug-on-error: debugpy's real adapter and a client of its protocol, and pdb at a real terminal."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import COMMAND, DEADLINE_S, FRESH, LIGHT, Job, free_ports, script, wait_for
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("without_torch")

# The ranks of its first argument fail, the others wait for rank 1, as in a collective.
PROGRAM = """
import os, sys, time
rank = os.environ["RANK"]
print("begun", flush=True)
def step(failing):
    secret = 41
    if rank in failing:
        raise (RuntimeError if "lost" in failing else ValueError)(failing[-1])
    if rank == "1":
        open("done", "w").close()
    while not os.path.exists("done"):
        time.sleep(0.01)
step(sys.argv[1].split(","))
"""
TWO = ("--nproc-per-node", "2")
LISTENS = r"""elaunch: rank (\d): pid \d+ .*waits for an IDE.*; for VS Code, in launch.json: (?#
)"type": "debugpy", "request": "attach", "connect": \{"host": "127.0.0.1", "port": (\d+)\}
elaunch: from another host first: ssh -L \2:127.0.0.1:\2 .+
elaunch: restarts and hang detection are off; the other ranks wait in their next collective until its timeout"""


@contextmanager
def attached(port: int, program: Path) -> Iterator[Callable[[str], str]]:
    """An IDE with a breakpoint in the program's first line: a value where the program has stopped.

    In the end the program runs on. The IDE is a client of the Debug Adapter Protocol, as VS Code is one.
    """
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as requests, requests.makefile("rb") as messages:

        def until(name: str, command: str, **arguments: object) -> dict[str, Any]:
            """Send a request. Returns the body of the next event or response of that name."""
            body = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments}).encode()
            requests.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            while True:
                length = int(messages.readline().split()[1])
                messages.readline()
                message = json.loads(messages.read(length))
                if name in (message.get("event"), message.get("command")):
                    assert message.get("success", True), message
                    return dict(message.get("body", {}))

        until("initialize", "initialize", adapterID="debugpy")
        until("initialized", "attach", connect={"host": "127.0.0.1", "port": port})
        until("setBreakpoints", "setBreakpoints", source={"path": str(program)}, breakpoints=[{"line": 2}])
        thread = until("stopped", "configurationDone")["threadId"]
        frame = until("stackTrace", "stackTrace", threadId=thread)["stackFrames"][0]
        yield lambda text: str(until("evaluate", "evaluate", expression=text, frameId=frame["id"])["result"])
        until("terminated", "continue", threadId=thread)


@pytest.mark.parametrize("words", [(*LIGHT, "train.py"), (*LIGHT, "-m", "train"), (*FRESH, "train.py")])
def test_a_rank_waits_for_an_ide_before_its_first_line_and_others_begin(words: tuple[str, ...], tmp_path: Path) -> None:
    program = script(tmp_path, PROGRAM)
    with Job(tmp_path, *TWO, "--debug", "1", *words, "none") as job:
        port = int(job.wait_for_output(LISTENS)[2])
        job.wait_for_output(r"^\[0\] begun$")
        assert {each.laddr.ip for each in psutil.net_connections("tcp") if each.laddr.port == port} == {"127.0.0.1"}

        with attached(port, program) as value:
            assert value("__name__") == "'__main__'"
            assert "[1] begun" not in job.stdout

        assert job.wait() == 0, job.output


def test_the_rank_may_be_on_another_node_and_ctrl_c_ends_its_wait_for_an_ide(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--run-id", "two", "--debug", "1")
    with ExitStack() as opened:
        # Else another test has it.
        with suppress(OSError):
            opened.enter_context(socket.create_server(("127.0.0.1", 5678)))
        jobs = [opened.enter_context(Job(tmp_path, *words, *LIGHT, "train.py", "none")) for _ in range(2)]
        found = wait_for(lambda: re.search(LISTENS, "\n".join(job.output for job in jobs)), "the rank that waits")

        jobs[0].signal(signal.SIGINT)

        assert [job.wait() for job in jobs] == [130, 130]
        assert not any(job.processes() for job in jobs)
    assert (found[1], found[2] != "5678") == ("1", True), "it takes no port that is in use"


def test_ctrl_c_ends_the_wait_for_an_ide_without_a_traceback(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)
    with Job(tmp_path, "--debug", "0", *LIGHT, "train.py", "none") as job:
        job.wait_for_output("until its timeout")

        job.signal(signal.SIGINT)

        assert job.wait() == 130
    assert "Traceback" not in job.output


@pytest.mark.parametrize(("option", "rank"), [("--debug", "2"), ("--debug-on-error", "all")])
def test_a_rank_that_the_job_does_not_have_is_refused(option: str, rank: str, tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)
    with Job(tmp_path, *TWO, option, rank, *LIGHT, "train.py", "none") as job:
        assert job.wait() == 2
    assert f"elaunch: there is no rank {rank} to debug; the job's ranks are 0 to 1" in job.stderr


@pytest.mark.parametrize(
    ("which", "start"), [("any", LIGHT), ("any", FRESH), ("1", LIGHT)], ids=["forked", "exec'd", "one rank"]
)
def test_an_ide_attaches_to_the_rank_that_raises_and_the_others_that_raise_are_kept(
    which: str, start: tuple[str, ...], tmp_path: Path
) -> None:
    program = script(tmp_path, PROGRAM)
    with Job(tmp_path, *TWO, "--debug-on-error", which, *start, "train.py", "0,1") as job:
        found = job.wait_for_output(LISTENS)
        other = job.wait_for_output(
            r"rank (\d): has raised ValueError, and waits for the debugger of another rank; Ctrl-C"
        )
        assert which in ("any", found[1])
        assert {found[1], other[1]} == {"0", "1"}

        with attached(int(found[2]), program) as value:
            assert value("secret") == "41"
            assert len(job.processes()) > 2

        assert job.wait() == 1
    assert job.output.count("waits for an IDE") == 1
    assert re.search(rf"rank {found[1]} .* raised ValueError: 1 in generation 0", job.stderr)


@pytest.mark.parametrize(("keys", "code"), [("q\n", 1), ("\x03", 130)])
def test_at_a_terminal_pdb_opens_in_the_rank_that_raises_and_leaves_the_terminal_as_it_was(
    keys: str, code: int, tmp_path: Path
) -> None:
    script(tmp_path, PROGRAM)
    words = (*TWO, "--redirects", "1", "--debug-on-error", "1", *LIGHT, "train.py", "1")
    with Terminal(tmp_path, *words, env={"TERM": "xterm", "TMPDIR": str(tmp_path)}) as terminal:
        before = terminal.settings()
        terminal.read_until("(Pdb) ")
        terminal.type("p secret + 1\n")
        terminal.read_until("42\r\n")
        terminal.read_until("(Pdb) ", times=2)
        terminal.read_until("ValueError: 1")
        assert terminal.settings() != before

        terminal.type(keys)

        assert terminal.read_all() == code, terminal.text
        assert terminal.settings() == before
    assert "elaunch: rank 1 has raised ValueError; q ends the job" in terminal.text


def test_a_rank_that_only_loses_its_peer_gets_no_debugger(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)
    with Job(tmp_path, *TWO, "--debug-on-error", "any", *LIGHT, "train.py", "1,lost,remote process exited") as job:
        assert job.wait() == 1
    assert ("lost a peer" in job.output, "IDE" in job.output) == (True, False)


def test_a_child_that_a_rank_has_forked_gets_no_debugger(tmp_path: Path) -> None:
    script(tmp_path, "import os\nif os.fork():\n    print(os.wait()[1])\nelse:\n    raise ValueError")
    with Job(tmp_path, *TWO, "--debug-on-error", "1", *LIGHT, "train.py") as job:
        assert job.wait() == 0
    assert sorted(job.stdout.splitlines()) == ["[0] 256", "[1] 256"]


def test_in_the_background_it_leaves_the_terminal_to_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.terminal.COMMAND", ["bash", "-mc"])
    command = shlex.join([*COMMAND, "--debug-on-error", "any", *FRESH, script(tmp_path, "raise ValueError").name])

    with Terminal(tmp_path, f"{command} & read line; kill -INT $!; wait $!; echo exit code $?") as terminal:
        terminal.read_until("waits for an IDE")
        terminal.type("\n")
        terminal.read_until("exit code 130")
