"""Programs that make, replace or detach processes behave as in a fresh interpreter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.fidelity.turns import Turns, taken
from tests.e2e.habits import fresh, worker
from tests.harness import FRESH, LIGHT, script, slow

ADDRESS = re.compile(rb"(?<=0x)[0-9a-f]+|(?<=pid=)\d+")

FORKS = {
    "child exits 3": "if not os.fork(): sys.exit(3)\nprint('waited', os.waitstatus_to_exitcode(os.wait()[1]))",
    "child raises": "if not os.fork(): 1 / 0\nprint('waited', os.waitstatus_to_exitcode(os.wait()[1]))",
    "child uses os._exit": "if not os.fork(): os._exit(4)\nprint('waited', os.waitstatus_to_exitcode(os.wait()[1]))",
    "child falls off the end": "pid = os.fork()\nif pid: os.wait()\nprint('parent' if pid else 'child')",
    "child of a child": "if not os.fork():\n    if not os.fork(): sys.exit(5)\n"
    "    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 1)\n"
    "print('waited', os.waitstatus_to_exitcode(os.wait()[1]))",
    "child runs atexit": "atexit.register(lambda: print('at exit of', 'parent' if os.getpid() == me else 'child'))\n"
    "if os.fork(): os.wait()",
    "child calls a function of __main__": "def work(): return __name__\n"
    "if not os.fork(): print('child is', work(), sys.modules['__main__'].work is work); sys.exit()\nos.wait()",
    "parent fails, child is done": "if not os.fork(): sys.exit(0)\nos.wait()\nsys.exit(6)",
    "forks in a thread": "def go():\n    if not os.fork(): os._exit(0)\n    print(os.wait()[1])\n"
    "t = threading.Thread(target=go); t.start(); t.join()",
    "hooks around a fork": "os.register_at_fork(before=lambda: print('before'), after_in_parent=lambda: None,\n"
    "    after_in_child=lambda: print('in the child'))\nif not os.fork(): os._exit(0)\nos.wait()",
}


OTHER = "import sys\nprint(sys.argv, sys.orig_argv, sys.path, sys.flags)"
EXECS = {
    "another script": "os.execv(sys.executable, [sys.executable, '-u', 'other.py', 'an argument'])",
    "itself once": "print(len(sys.argv), sys.orig_argv[1:])\n"
    "if 'AGAIN' not in os.environ:\n"
    "    os.environ['AGAIN'] = os.environ['LD_LIBRARY_PATH'] = '/nowhere'\n"
    "    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])\n"
    "print('again', os.environ['LD_LIBRARY_PATH'])\nsys.exit(7)",
    "itself by its arguments": "if len(sys.argv) < 3: os.execl(sys.executable, 'python', *sys.argv, 'more')\n"
    "print(sys.argv)",
    "a command": "os.execvp('echo', ['echo', 'from', 'echo'])",
    "a command that is not there": "try: os.execvp('no-such-command', ['x'])\n"
    "except FileNotFoundError as error: print(error)",
    "with an environment": "os.execve('/bin/sh', ['sh', '-c', 'echo $ONLY$HOME'], {'ONLY': 'this'})",
}


# Everything that a `python -c` started by a worker can see about its origin.
LOOK = """
import json, os, sys
print(json.dumps({
    "path": sys.path,
    "modules": sorted(sys.modules),
    "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "meta_path": [repr(finder).split(" at ")[0] for finder in sys.meta_path],
    "path_hooks": len(sys.path_hooks),
    "environment": dict(os.environ),
    "orig_argv": sys.orig_argv,
    "flags": str(sys.flags),
    "fds": [int(fd) for fd in os.listdir("/proc/self/fd") if ".so" not in os.path.realpath(f"/proc/self/fd/{fd}")],
}))
"""
# The variables that torchrun also sets, and those that docs/variables.md lists as elaunch's own.
DOCUMENTED = re.compile(
    "(LOCAL_|GROUP_|ROLE_|GROUP_WORLD_|LOCAL_WORLD_|ROLE_WORLD_)?(RANK|SIZE|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    "|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|ELAUNCH_(GENERATION|GENERATION_SECRET|LINK|MARKER|MEMORY)"
)


@pytest.mark.parametrize("pythonpath", [None, slow(""), "one::two", slow(":")], ids=repr)
def test_a_python_below_a_worker_sees_no_trace_of_us(tmp_path: Path, pythonpath: str | None) -> None:
    script(
        tmp_path,
        f"import os, subprocess, sys\nlook = {LOOK!r}\nexec(look)\n"
        "subprocess.run([sys.executable, '-c', look])\n"
        "subprocess.run([sys.executable, '-c', look], close_fds=False)\n",
    )
    env = {} if pythonpath is None else {"PYTHONPATH": pythonpath}
    expected = [json.loads(line) for line in fresh(tmp_path, "train.py", env=env).out.splitlines()]

    for how in (LIGHT, FRESH):
        run = worker(tmp_path, "train.py", how=how, env=env)

        seen = [json.loads(line) for line in run.out.splitlines()]
        assert len(seen) == 3, str(run)
        # The worker itself has a finder that waits for torch; it is documented.
        seen[0]["meta_path"] = [name for name in seen[0]["meta_path"] if "forkserver.collectives" not in name]
        for place, (mine, theirs) in enumerate(zip(seen, expected, strict=True)):
            extra = mine["environment"].keys() - theirs["environment"].keys()
            assert [name for name in extra if not DOCUMENTED.fullmatch(name)] == [], str(run)
            for name, value in theirs["environment"].items():
                # What configured this job is not for the jobs inside it.
                assert mine["environment"].get(name) == (None if name.startswith("PET_") else value), name
            # The link and the file for a crash are elaunch's, and documented; a child gets no crash file. The fd that
            # lists the folder has the next number.
            assert set(mine["fds"]) - set(theirs["fds"]) <= {3, 4, *([1023] if place == 0 else [])}, (how, place)
            for name in mine.keys() - {"environment", "fds", *(["modules"] if place == 0 else [])}:
                assert mine[name] == theirs[name], (how, place, name)


TURNS = {
    **{name: f"import atexit, os, sys, threading\nme = os.getpid()\n{text}" for name, text in FORKS.items()},
    **{name: f"import os, sys\n{text}" for name, text in EXECS.items()},
}


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    folder = tmp_path_factory.mktemp("forked").resolve()
    script(folder, OTHER, "other.py")
    return taken(folder, LIGHT, TURNS, "one")


@pytest.mark.parametrize("name", FORKS)
def test_what_a_script_forks_is_its_own(forked: Turns, name: str) -> None:
    assert_same(forked, name)


@pytest.mark.parametrize("name", EXECS)
def test_a_script_that_execs_becomes_that(forked: Turns, name: str) -> None:
    assert_same(forked, name)


def assert_same(turns: Turns, name: str) -> None:
    ours, theirs = turns.both(name)
    assert (ours.code, ours.out) == (theirs.code, theirs.out)
    assert ADDRESS.sub(b"", ours.err).decode() == ADDRESS.sub(b"", theirs.err).decode()
    assert "fresh interpreter" not in turns.logged
