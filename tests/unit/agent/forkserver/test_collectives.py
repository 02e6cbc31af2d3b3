"""agent.forkserver.collectives in a process of this Python, with a small stand-in for torch's two modules.

Real torch is in tests/unit/agent/diagnosis/test_samplers.py; here are the torches that this machine has not got.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import environment

C10D = """
import _thread, socket
def _update_default_pg(pg): pass
def init(threads):
    for _ in range(threads):
        lock = _thread.allocate_lock()
        lock.acquire()
        _thread.start_new_thread(lock.acquire, ())
    _update_default_pg("a group")
"""
NATIVE = "import torch._C._distributed_c10d\n"
DUMP = "def _dump_fr_trace_json(with_entries, only_active): return b'{}'\n"
PROGRAM = """
import json, os, sys, warnings
os.dup2(int(sys.argv[1]), 3)
from elaunch.agent.forkserver import collectives
collectives.prepare(None)
if sys.argv[3] == "closed": os.close(3)
import torch.distributed.distributed_c10d as c10d, torch.distributed.later
def tasks(): return len(os.listdir("/proc/self/task"))
if sys.argv[3] == "forked":
    if os.fork():
        os.wait()
        sys.exit()
c10d.init(int(sys.argv[2]))
found = tasks()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    if os.fork() == 0: os._exit(0)
os.wait()
print(json.dumps([found, len(warned)]), flush=True)
# The thread still waits for a question.
"""

# As torch 2.13 has them in torch/distributed/rendezvous.py.
STORES = """
def _update_default_pg(pg): pass
def _torchelastic_use_agent_store(): return True
def _create_c10d_store(hostname, port): return "client" if _torchelastic_use_agent_store() else "server"
def rendezvous(port): return _create_c10d_store("localhost", port)
"""
ROLES = """
import json, os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["MASTER_PORT"] = "29500"
from elaunch.agent.forkserver import collectives
collectives.prepare(None)
import torch.distributed.distributed_c10d as c10d, torch.distributed.later
os.environ["MASTER_PORT"] = "29600"
print(json.dumps([c10d.rendezvous(29500), c10d.rendezvous(29600)]))
"""


def run(
    folder: Path, *, native: str = DUMP, c10d: str = C10D, threads: int = 1, how: str = "", program: str = PROGRAM
) -> list[int]:
    """How many threads the process has after its process group has started `threads`, and the warnings of a fork."""
    files = {"__init__": "", "_C/__init__": "", "_C/_distributed_c10d": native}
    files |= {"distributed/__init__": "", "distributed/distributed_c10d": f"{NATIVE}{c10d}", "distributed/later": ""}
    for name, text in files.items():
        path = folder / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(theirs.fileno()), str(threads), how],
            cwd=folder,
            env=environment({"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}),
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            timeout=180,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b""), ended.stderr
    found: list[int] = json.loads(ended.stdout)
    return found


def test_beside_threads_of_the_process_group_there_is_one_more(tmp_path: Path) -> None:
    # Python warns from 3.12 on. It would without the thread, too.
    assert run(tmp_path) == [3, int(sys.version_info >= (3, 12))]


@pytest.mark.parametrize(
    ("case", "threads"),
    [
        ({"threads": 0}, 1),
        ({"native": ""}, 2),
        ({"c10d": C10D.replace("_update_default_pg", "_set_default_group")}, 2),
        ({"native": "def _dump_fr_trace_json(): return b'{}'\n"}, 3),
        ({"how": "closed"}, 2),
        ({"how": "forked"}, 2),
    ],
    ids=[
        "a group without threads",
        "no recorder",
        "another torch",
        "another call",
        "a closed link",
        "a forked process",
    ],
)
def test_where_it_is_of_no_use_or_would_change_the_program_there_is_none(
    tmp_path: Path, case: dict[str, object], threads: int
) -> None:
    assert run(tmp_path, **case)[0] == threads  # type: ignore[arg-type]


def test_the_agents_store_is_the_one_at_its_port_and_the_program_hosts_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, c10d=STORES, program=ROLES) == ["client", "server"]  # type: ignore[comparison-overlap]
