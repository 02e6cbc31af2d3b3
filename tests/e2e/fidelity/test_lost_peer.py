"""A forked worker that has lost a peer leaves its memory to the kernel. Nothing else of its end is another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.e2e.fidelity.ways import EXECED
from tests.harness import finished, script

# Python frees memory by itself where ctypes is not there.
FORKED = ("--preload-only", "ctypes")
OPTIONS = ("--nproc-per-node", "2", "--max-restarts", "1", "--show-all-tracebacks", "--log-dir", "logs")
# Rank 1 fails. In the first generation rank 0's handler ends the program, in the second one its collective.
PROGRAM = """
import atexit, ctypes, gzip, json, os, signal, sys, time
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
signal.signal(signal.SIGTERM, handle)
def wait():
    open("ready" + GENERATION, "x").close()
    if GENERATION == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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


def ends(folder: Path) -> list[int]:
    """The exit codes of rank 0."""
    events = [json.loads(line) for line in (folder / "logs/latest/timeline.jsonl").read_text().splitlines()]
    return [each["code"] for each in events if each["event"] == "exited" and each["rank"] == 0]


def written(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}{generation}").read_text() for generation in (0, 1)]


@pytest.mark.parametrize("finalizers", ["", FINALIZERS], ids=["files alone", "finalizers too"])
def test_a_worker_that_lost_a_peer_keeps_its_exit_code_its_files_and_its_finalizers(
    tmp_path: Path, finalizers: str
) -> None:
    script(tmp_path, f"{PROGRAM}{finalizers}wait()\n")

    job = finished(tmp_path, *FORKED, *OPTIONS, "train.py")

    assert ends(tmp_path) == [7, 1], job.output
    assert [written(tmp_path, name) for name in ("global", "cycle", "exit")] == [["data", "data"]] * 3
    assert job.output.count("RuntimeError: Connection closed by peer") >= 1
    if finalizers:
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
