"""A forked worker that has lost a peer leaves its memory to the kernel. Nothing else of its end is another."""

from __future__ import annotations

import dbm.dumb
import gzip
import json
import shelve
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fidelity.ways import EXECED
from tests.harness import RUN_LIMIT_S, finished, script

# Python frees memory by itself where ctypes is not there.
FORKED = ("--preload-only", "ctypes")
OPTIONS = ("--nproc-per-node", "2", "--max-restarts", "1", "--show-all-tracebacks", "--log-dir", "logs")
# What it does at its end may have to wait for a CPU.
OPTIONS += ("--failure-grace", "300")
# Rank 1 fails. In the first generation rank 0's handler ends the program, in the second one its collective.
PROGRAM = """
import atexit, ctypes, gc, gzip, json, os, signal, sys, time, weakref
# Python's collector closes a file in a cycle without what the file holds. It must not run before the end.
gc.disable()
GENERATION = os.environ["ELAUNCH_GENERATION"]
class Loop:
    def __init__(self, file):
        self.file, self.itself = file, self
def handle(*_):
    sys.exit(7)
if os.environ["RANK"] == "1":
    while not os.path.exists("ready" + GENERATION):
        time.sleep(0.01)
    os._exit(3)
written = open("global" + GENERATION, "w")
written.write("data")
Loop(open("cycle" + GENERATION, "w")).file.write("data")
atexit.register(open("exit" + GENERATION, "w").write, "data")
# Its class is of C: what it does at its end, only its end shows.
plain = {1}
said = type(handle)((lambda _: os.write(1, b"the plain object ends\\n")).__code__, {"os": os})
json.watch = weakref.ref(plain, said)
signal.signal(signal.SIGTERM, handle)
def wait():
    if GENERATION == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready" + GENERATION, "x").close()
    if GENERATION == "1":
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    while True:
        time.sleep(0.01)
"""
FINALIZERS = """
class Said:
    def __init__(self, text):
        self.text = text
    def __del__(self):
        os.write(1, b"the object of " + self.text + b" ends\\n")
mine, json.kept = Said(b"the program"), Said(b"a library")
Loop(Said(b"a cycle"))
Loop(gzip.open("packed" + GENERATION, "wt")).file.write("data")
"""
GENERATOR = """
def generate():
    try:
        yield
    finally:
        os.write(1, b"a generator ends\\n")
generator = Loop(generate())
next(generator.file)
del generator
"""
LIBRARIES = """
# As a registry of functions, which keeps the program's globals.
json.kept = handle
import dbm.dumb, shelve, tempfile
temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
shelf = shelve.Shelf(dbm.dumb.open("shelf" + GENERATION, "n"), writeback=True)
shelf["list"] = []
shelf["list"].append("data")
"""
# A thread holds a file's lock for ever: nobody reads the pipe.
BLOCKED = """
import threading
pipe = open(os.pipe()[1], "wb")
def fill():
    while True:
        pipe.write(bytes(1 << 20))
threading.Thread(target=fill, daemon=True).start()
"""
# The same in C, for a file that is read.
READING_IN_C = """
import threading
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(os.pipe()[0], b"r"))
threading.Thread(target=libc.fgetc, args=(stream,), daemon=True).start()
"""
# The thread runs while the finalizer waits.
THREAD = """
import threading
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.1)
slow = Slow()
def look():
    while True:
        slow
        time.sleep(0.001)
threading.Thread(target=look, daemon=True).start()
"""
WAITING_SOCKET = """
import socket, threading
socket.socket.recv = lambda *_: threading.Event().wait()
"""
# As HDF5, which closes its files then.
EXIT_FUNCTION_IN_C = """
import mmap
with open("libhdf5.so", "a+") as library:
    library.truncate(1)
    loaded = mmap.mmap(library.fileno(), 1)
unlink = ctypes.cast(ctypes.CDLL(None).unlink, ctypes.c_void_p)
with open("open" + GENERATION, "x"):
    path = ctypes.create_string_buffer(b"open" + GENERATION.encode())
ctypes.pythonapi.Py_IncRef(ctypes.py_object(path))
ctypes.CDLL(None)["__cxa_atexit"](unlink, path, None)
"""
EARLIER = """
import atexit, ctypes, sys
atexit.register(lambda: print("elaunch" in sys.modules))
from elaunch.agent.forkserver.quick_end import QuickEnd
QuickEnd().arm(0, None)
raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
"""


def ends(folder: Path) -> list[int]:
    """The exit codes of rank 0."""
    events = [json.loads(line) for line in (folder / "logs/latest/timeline.jsonl").read_text().splitlines()]
    return [each["code"] for each in events if each["event"] == "exited" and each["rank"] == 0]


def written(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}{generation}").read_text() for generation in (0, 1)]


@pytest.mark.parametrize("finalizers", ["", GENERATOR, FINALIZERS], ids=["files alone", "a generator", "finalizers"])
def test_a_worker_that_lost_a_peer_keeps_its_exit_code_its_files_and_its_finalizers(
    tmp_path: Path, finalizers: str
) -> None:
    script(tmp_path, f"{PROGRAM}{finalizers}wait()\n")

    job = finished(tmp_path, *FORKED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output
    assert [written(tmp_path, name) for name in ("global", "cycle", "exit")] == [["data", "data"]] * 3
    assert job.output.count("RuntimeError: Connection closed by peer") >= 1
    if finalizers == GENERATOR:
        assert job.stdout.count("a generator ends") == 2
    if finalizers == "":
        assert job.stdout.count("the plain object ends") == 2
    if finalizers == FINALIZERS:
        # Not what only a library refers to: this shows that the library was not taken apart.
        said = ("the program", "a cycle", "a library")
        assert [job.stdout.count(f"the object of {each} ends") for each in said] == [2, 2, 0]
        packed = [gzip.decompress((tmp_path / f"packed{generation}").read_bytes()) for generation in (0, 1)]
        assert packed == [b"data", b"data"]


def test_a_fresh_interpreter_that_lost_a_peer_frees_all_of_its_memory(tmp_path: Path) -> None:
    script(tmp_path, f"{PROGRAM}{FINALIZERS}wait()\n")

    job = finished(tmp_path, *EXECED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output
    assert job.stdout.count("the object of a library ends") == 2


def test_objects_of_libraries_that_the_program_has_end_as_ever(tmp_path: Path) -> None:
    script(tmp_path, f"{PROGRAM}{LIBRARIES}wait()\n")

    job = finished(tmp_path, *FORKED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output
    assert not list(tmp_path.glob("temporary*"))
    for generation in (0, 1):
        with shelve.Shelf(dbm.dumb.open(str(tmp_path / f"shelf{generation}"), "r")) as shelf:
            assert shelf["list"] == ["data"]


@pytest.mark.parametrize(
    "blocked", [BLOCKED, READING_IN_C, WAITING_SOCKET], ids=["python writes", "c reads", "sockets wait"]
)
def test_what_blocks_for_ever_does_not_hold_up_the_end(tmp_path: Path, blocked: str) -> None:
    script(tmp_path, f"{PROGRAM}{blocked}wait()\n")

    job = finished(tmp_path, *FORKED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output


def test_a_daemon_thread_says_nothing_of_globals_that_have_ended(tmp_path: Path) -> None:
    script(tmp_path, f"{PROGRAM}{THREAD}wait()\n")

    job = finished(tmp_path, *FORKED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output
    assert "NameError" not in job.output


def test_exit_functions_of_hdf5_run(tmp_path: Path) -> None:
    script(tmp_path, f"{PROGRAM}{EXIT_FUNCTION_IN_C}wait()\n")

    job = finished(tmp_path, *FORKED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output
    assert not list(tmp_path.glob("open*"))


def test_exit_functions_that_were_there_earlier_find_their_modules(tmp_path: Path) -> None:
    script(tmp_path, EARLIER)

    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S
    )

    assert (done.returncode, done.stdout) == (1, "True\n"), done.stderr
