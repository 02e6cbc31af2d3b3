"""A forked worker is what a fresh `python -u script.py` would have been; each fact is compared with a real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import LIGHT, Watched, library
from tests.harness import environment, script

FRESH = ("--no-preload",)
WAYS = pytest.mark.parametrize("how", [LIGHT, FRESH], ids=["forked", "no-preload"])

# Looks at itself before it does anything else; os and sys are there in every interpreter.
LOOK = """
import os, sys
open_fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
threads = os.listdir("/proc/self/task")
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
import ctypes, json, random, signal

class Kept:
    pass

def died_with_parent():
    signum = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signum))
    return signum.value

here = {
    "argv": sys.argv,
    "path": sys.path,
    "file": __file__,
    "name": __name__,
    "main": sorted(vars(sys.modules["__main__"]).keys() - {"here"}),
    "spec": repr(__spec__),
    "loader": type(__loader__).__name__,
    "package": __package__,
    "class": Kept.__module__,
    "cwd": os.getcwd(),
    "ps": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0"),
    "comm": open("/proc/self/comm").read(),
    "orig_argv": sys.orig_argv,
    "executable": sys.executable,
    "flags": {name: getattr(sys.flags, name) for name in dir(sys.flags)
              if name[0] != "_" and not callable(getattr(sys.flags, name))},
    "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "SigPnd")},
    "handlers": {s.name: str(signal.getsignal(s)) for s in sorted(signal.valid_signals()) if hasattr(s, "name")
                 and "function" not in str(signal.getsignal(s))},
    "python": {s: signal.getsignal(s) is signal.default_int_handler for s in (signal.SIGINT, signal.SIGTERM)},
    "wakeup": signal.set_wakeup_fd(-1),
    "umask": os.umask(0o22),
    "nice": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "oom": open("/proc/self/oom_score_adj").read(),
    "limits": open("/proc/self/limits").read(),
    "threads": len(threads),
    "streams": {s.name: [s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.newlines, s.closed,
                         type(s.buffer).__name__, s.isatty(), s.fileno()] for s in (sys.stdin, sys.stdout, sys.stderr)},
    "dunder": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()],
    "environment": sorted(name for name in os.environ),
}
ours = {
    "fds": open_fds,
    "parent": os.getppid(),
    "pid": os.getpid(),
    "session": os.getsid(0),
    "group": os.getpgrp(),
    "death_signal": died_with_parent(),
}
with open("facts" + os.environ.get("RANK", ""), "w") as file:
    json.dump({"here": here, "ours": ours}, file)
"""


def run_fresh(folder: Path, *args: str, **popen: Any) -> subprocess.CompletedProcess[bytes]:
    """The same program in a real fresh interpreter, with the stdio that a worker of two gets."""
    return subprocess.run(
        [sys.executable, "-u", *args], cwd=folder, env=environment({"OMP_NUM_THREADS": "1"}), capture_output=True,
        stdin=subprocess.DEVNULL, check=False, timeout=60, **popen,
    )  # fmt: skip


def run_worker(folder: Path, how: tuple[str, ...], *args: str) -> tuple[int | None, bytes, bytes, str]:
    """A plain launch of one worker: its own exit code (None for 0), stdout, stderr, and the launcher's words."""
    with Watched(folder, *how, "--max-restarts", "0", "--log-dir", "logs", "-r", "3", *args) as job:
        code = job.wait()
        said = job.output
    (logs,) = (folder / "logs").glob("*/attempt_0/0")
    found = re.search(r"exitcode +: (-?\d+)", said)
    assert (code == 0) is (found is None), said
    return (
        int(found[1]) if found else None,
        (logs / "stdout.log").read_bytes(),
        (logs / "stderr.log").read_bytes(),
        said,
    )


def looked_at(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


class TestFacts:
    @WAYS
    def test_all_that_a_script_can_see_is_as_in_a_fresh_interpreter(self, tmp_path: Path, how: tuple[str, ...]) -> None:
        script(tmp_path, LOOK)
        args = ("train.py", "--lr", "0.1", "two words")
        with Watched(tmp_path, *how, "--nproc-per-node", "2", *args) as job:
            assert job.wait() == 0, job.output
        run_fresh(tmp_path, *args)

        worker, fresh = looked_at(tmp_path / "facts1")["here"], looked_at(tmp_path / "facts")["here"]

        extra = set(worker.pop("environment")) - set(fresh.pop("environment"))
        assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ELAUNCH_GENERATION", "ELAUNCH_LINK"} <= extra
        assert not {name for name in extra if name.startswith(("OPENBLAS", "PYTORCH", "TORCHINDUCTOR"))}
        for name in fresh:
            assert worker[name] == fresh[name], name

    @WAYS
    def test_its_place_among_processes(self, tmp_path: Path, how: tuple[str, ...]) -> None:
        script(tmp_path, LOOK + "\nprint('ready', flush=True)\nwhile True: signal.pause()")
        with Watched(tmp_path, *how, "--nproc-per-node", "2", "train.py") as job:
            job.wait_for_output(r"\[0\] ready")
            job.wait_for_output(r"\[1\] ready")

            ours = [looked_at(tmp_path / f"facts{rank}")["ours"] for rank in range(2)]

            for facts in ours:
                assert facts["parent"] == job.fork_server().pid
                assert facts["session"] == facts["group"] == facts["pid"]
                assert facts["death_signal"] == 9
                # 0, 1, 2, the link, and the one that lists them.
                assert sorted(facts["fds"]) == [0, 1, 2, 3, 4]

    def test_a_module_is_run_as_python_m_runs_it(self, tmp_path: Path) -> None:
        (tmp_path / "pack").mkdir()
        script(tmp_path / "pack", "")
        (tmp_path / "pack" / "__init__.py").touch()
        script(tmp_path / "pack", LOOK, "__main__.py")
        with Watched(tmp_path, *LIGHT, "--nproc-per-node", "2", "-m", "pack", "--lr", "1") as job:
            assert job.wait() == 0, job.output
        run_fresh(tmp_path, "-m", "pack", "--lr", "1")

        worker, fresh = looked_at(tmp_path / "facts1")["here"], looked_at(tmp_path / "facts")["here"]

        for name in fresh.keys() - {"environment", "spec"}:
            assert worker[name] == fresh[name], name

    def test_random_numbers_differ_between_ranks_and_generations_and_nothing_of_torch_was_started(
        self, tmp_path: Path
    ) -> None:
        script(
            tmp_path,
            """
import json, os, random, signal, sys
threads = len(os.listdir("/proc/self/task"))
import numpy, torch, multiprocessing
facts = {
    "torch": torch.initial_seed(), "drawn": torch.rand(1).item(), "numpy": float(numpy.random.rand()),
    "random": random.random(), "authkey": bytes(multiprocessing.current_process().authkey).hex(),
    "threads": threads, "cuda": torch.cuda.is_initialized(), "bad_fork": torch.cuda._is_in_bad_fork(),
    "devices": [p for fd in os.listdir("/proc/self/fd") if os.path.exists(f := f"/proc/self/fd/{fd}")
                and (p := os.readlink(f)).startswith("/dev/nvidia")],
}
generation = os.environ["ELAUNCH_GENERATION"]
with open(f"{generation}.{os.environ['RANK']}", "w") as file:
    json.dump(facts, file)
if generation == "0":
    while not (os.path.exists("0.0") and os.path.exists("0.1")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
""",
        )
        with Watched(tmp_path, "--nproc-per-node", "2", "train.py") as job:
            assert job.wait() == 0, job.output

        facts = [json.loads((tmp_path / f"{g}.{r}").read_text()) for g in range(2) for r in range(2)]

        assert "generation 1" in job.stderr
        for source in ("torch", "drawn", "numpy", "random", "authkey"):
            assert len({f[source] for f in facts}) == 4, f"{source}: {[f[source] for f in facts]}"
        for f in facts:
            assert (f["threads"], f["cuda"], f["bad_fork"], f["devices"]) == (1, False, False, [])


DEEP = """
import helper
def outer():
    def inner(x):
        return helper.divide(x)
    return inner(0)
"""
ENDS = {
    "plain": DEEP + "outer()",
    "chained": DEEP + "try:\n    outer()\nexcept ZeroDivisionError as error:\n    raise ValueError('wörds') from error",
    "during": DEEP + "try:\n    outer()\nfinally:\n    {}['missing']",
    "top-level": "raise RuntimeError('at the top\\nin two lines')",
    "in-import": "import broken",
    "syntax": "def f(:\n    pass",
    "syntax-in-import": "import torn",
    "own-class": "class Own(Exception):\n    pass\nraise Own",
    "note": "e = ValueError('x')\ngetattr(e, 'add_note', print)('a note')\nraise e",
    "own-hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, file=sys.stderr)\n1 / 0",
    "exit-none": "import sys; print('out'); sys.exit(None)",
    "exit-3": "import sys; print('out', file=sys.stderr); sys.exit(3)",
    "exit-text": "import sys; sys.exit('told why')",
    "exit-true": "import sys; sys.exit(True)",
    "exit-300": "import sys; sys.exit(300)",
    "system-exit": "raise SystemExit(4)",
    "os-exit": "import os; print('no newline', end=''); os._exit(5)",
    "interrupt": "raise KeyboardInterrupt",
    "sigint": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not here')",
    "sigsegv": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "atexit": "import atexit; atexit.register(print, 'last words'); print('first')",
    "atexit-after-error": "import atexit; atexit.register(print, 'last words'); 1 / 0",
    "atexit-raises": "import atexit; atexit.register(lambda: 1 / 0); print('first')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('from the thread'))).start()\nprint('main is done')",
    "thread-after-error": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('from the thread'))).start()\n1 / 0",
    "thread-error": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "destructor": "class D:\n    def __del__(self):\n        print('deleted')\nd = D()",
    "unraisable": "class D:\n    def __del__(self):\n        1 / 0\nd = D()\ndel d",
    "unwritten": "import sys; sys.stdout.write('no newline'); sys.stdout.buffer.write(b' bytes')",
    "warning": "import warnings\ndef f():\n    warnings.warn('careful')\nf()",
    "stdin": "import sys; print(repr(sys.stdin.read()))",
}


def _without_addresses(text: bytes) -> bytes:
    return re.sub(rb" at 0x[0-9a-f]+>", b" at 0x>", text)


class TestEnds:
    """Exit code, stdout and stderr byte for byte, in both ways and fresh."""

    @pytest.mark.parametrize("name", ENDS)
    def test_a_forked_worker_ends_as_a_fresh_interpreter_does(self, tmp_path: Path, name: str) -> None:
        script(tmp_path, ENDS[name])
        script(tmp_path, "def divide(x):\n    return 1 / x\n", "helper.py")
        script(tmp_path, "import helper\nhelper.divide(0)\n", "broken.py")
        script(tmp_path, "x = (\n", "torn.py")
        fresh = run_fresh(tmp_path, "train.py")

        code, out, err, _ = run_worker(tmp_path, LIGHT, "train.py")

        assert (code or 0, out) == (fresh.returncode, fresh.stdout)
        assert _without_addresses(err) == _without_addresses(fresh.stderr)

    def test_no_preload_ends_the_same_way(self, tmp_path: Path) -> None:
        script(tmp_path, ENDS["chained"])
        script(tmp_path, "def divide(x):\n    return 1 / x\n", "helper.py")
        fresh = run_fresh(tmp_path, "train.py")

        code, out, err, _ = run_worker(tmp_path, FRESH, "train.py")

        assert (code, out, err) == (fresh.returncode, fresh.stdout, fresh.stderr)

    def test_a_module_that_fails_or_is_not_there(self, tmp_path: Path) -> None:
        script(tmp_path, ENDS["chained"], "mod.py")
        script(tmp_path, "def divide(x):\n    return 1 / x\n", "helper.py")
        for number, module in enumerate(("mod", "nosuchmodule", "nosuch.module")):
            folder = tmp_path / str(number)
            folder.mkdir()
            for name in ("mod.py", "helper.py"):
                (folder / name).write_bytes((tmp_path / name).read_bytes())
            fresh = run_fresh(folder, "-m", module)

            code, out, err, _ = run_worker(folder, LIGHT, "-m", module)

            assert (code, out, err) == (fresh.returncode, fresh.stdout, fresh.stderr), module

    def test_a_died_by_sigint_is_named_so(self, tmp_path: Path) -> None:
        script(tmp_path, "raise KeyboardInterrupt")

        code, _, _, said = run_worker(tmp_path, LIGHT, "train.py")

        assert code == -2
        assert "SIGINT" in said


MULTIPROCESSING = """
import inspect, json, multiprocessing, os, pickle, sys
from concurrent.futures import ProcessPoolExecutor

class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x), __name__

if __name__ == "__main__":
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            (point, name), = pool.map(double, [Point(21)])
        found[method] = [point.x, type(point) is Point, name]
    with ProcessPoolExecutor(1) as pool:
        found["futures"] = pool.submit(double, Point(1)).result()[0].x
    found["pickle"] = pickle.loads(pickle.dumps(Point(7))).x
    found["bytes"] = pickle.dumps(Point).hex()
    found["function"] = inspect.getsource(double)
    found["class"] = inspect.getsource(Point)
    found["lines"] = inspect.getsourcelines(double)[1]
    found["method"] = multiprocessing.get_start_method()
    print(json.dumps(found))
"""

LOADERS = """
import json, os
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index * index)

if __name__ == "__main__":
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        found[method] = [batch.tolist() for batch in loader]
    print("loaded", json.dumps(found))
"""


class TestMultiprocessing:
    @WAYS
    def test_pools_of_every_kind_pickles_and_sources_work_as_in_a_fresh_interpreter(
        self, tmp_path: Path, how: tuple[str, ...]
    ) -> None:
        script(tmp_path, MULTIPROCESSING)
        fresh = run_fresh(tmp_path, "train.py")

        code, out, err, said = run_worker(tmp_path, how, "train.py")

        assert code is None, said + err.decode()
        assert json.loads(out) == json.loads(fresh.stdout)
        assert err == fresh.stderr

    def test_data_loaders_of_every_kind_work(self, tmp_path: Path) -> None:
        script(tmp_path, LOADERS)
        with Watched(tmp_path, "--nproc-per-node", "1", "train.py") as job:
            code = job.wait()

        assert code == 0, job.output
        found = json.loads(job.stdout.split("loaded ")[1])
        assert found.keys() == {"fork", "spawn", "forkserver"}
        assert all(batches == [[0, 1, 4, 9], [16, 25, 36, 49]] for batches in found.values())


class TestFallback:
    """Where forking would not be faithful, workers are fresh interpreters, and one sentence says why."""

    def assert_fresh(self, job: Watched, why: str) -> None:
        assert job.wait() == 0, job.output
        told = [line for line in job.said_by_agent() if "fresh interpreter" in line]
        assert len(told) == 1, job.output
        assert why in told[0]

    @pytest.mark.parametrize("how", [(), LIGHT, ("--preload", "profile")], ids=["torch", "json", "profile"])
    def test_a_file_that_would_shadow_a_preloaded_module_is_imported_as_without_us(
        self, tmp_path: Path, how: tuple[str, ...]
    ) -> None:
        name = "json" if how == LIGHT else "profile"
        # Below the current folder, which is in the search path of the agent of a test (python -m).
        folder = tmp_path / "mine"
        folder.mkdir()
        script(folder, "MINE = 'the one beside the script'", f"{name}.py")
        script(folder, f"import {name}\nprint({name}.MINE)")

        with Watched(tmp_path, *how, "--nproc-per-node", "2", "mine/train.py") as job:
            self.assert_fresh(job, str(folder / f"{name}.py"))

        assert job.stdout.count("the one beside the script") == 2

    def test_a_preloaded_module_that_starts_a_thread(self, tmp_path: Path) -> None:
        env = library(
            tmp_path,
            "threaded",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        )
        script(
            tmp_path, "import os, sys\nprint('threads', len(os.listdir('/proc/self/task')), 'threaded' in sys.modules)"
        )

        with Watched(tmp_path, "--preload", "threaded", "--nproc-per-node", "2", "train.py", env=env) as job:
            self.assert_fresh(job, "a preloaded module started a thread")

        assert job.stdout.count("threads 1 False") == 2

    @pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit('no')", "import nosuch"], ids=str)
    def test_a_preloaded_module_that_fails(self, tmp_path: Path, text: str) -> None:
        env = library(tmp_path, "failing", text)
        script(tmp_path, "print('the script ran')")

        with Watched(tmp_path, "--preload", "failing", "--nproc-per-node", "2", "train.py", env=env) as job:
            self.assert_fresh(job, "importing failing failed" if "Exit" not in text else "")

        assert job.stdout.count("the script ran") == 2

    def test_a_module_that_is_not_there(self, tmp_path: Path) -> None:
        script(tmp_path, "print('the script ran')")

        with Watched(tmp_path, "--preload", "nosuch", "--nproc-per-node", "2", "train.py") as job:
            self.assert_fresh(job, "importing nosuch failed: ModuleNotFoundError: No module named 'nosuch'")

        assert job.stdout.count("the script ran") == 2

    def test_without_a_reason_workers_are_forked(self, tmp_path: Path) -> None:
        env = library(tmp_path, "told", "import os; BY = os.getpid()")
        script(tmp_path, "import os, told\nprint('forked', told.BY == os.getppid())")

        with Watched(tmp_path, "--preload", "told", "--nproc-per-node", "2", "train.py", env=env) as job:
            assert job.wait() == 0

        assert job.stdout.count("forked True") == 2
        assert "fresh interpreter" not in job.output
