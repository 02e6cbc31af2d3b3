"""A worker ends as a fresh interpreter does: exit code, stdout and stderr, byte for byte."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.e2e.fidelity.turns import Turns, taken
from tests.e2e.fidelity.ways import End, fresh, share, worker
from tests.harness import FRESH, LIGHT

HELPERS = {
    "helper.py": "def divide(x):\n    return 1 / x\n",
    "broken.py": "import helper\nhelper.divide(0)\n",
    "torn.py": "x = (\n",
    "torn_pack/__init__.py": "import helper\nhelper.divide(0)\n",
    "mainless/__init__.py": "",
    "wrong.zip": "PK\x03\x04 and no more",
    "failing/__main__.py": "import helper\nhelper.divide(0)\n",
    "failing/helper.py": "def divide(x):\n    return 1 / x\n",
}
DEEP = """
import helper
def outer():
    def inner(x):
        return helper.divide(x)
    return inner(0)
"""
# It speaks when the main thread has come to its end.
THREAD = """
import threading
def speak():
    threading.main_thread().join()
    print('from the thread')
threading.Thread(target=speak).start()
"""
ENDS = {
    "plain": DEEP + "outer()",
    "chained": DEEP + "try:\n    outer()\nexcept ZeroDivisionError as error:\n    raise ValueError('wörds') from error",
    "during": DEEP + "try:\n    outer()\nfinally:\n    {}['missing']",
    "in an import": "import broken",
    "missing import": "import nosuchmodule",
    "syntax": "def f(:\n    pass",
    "syntax in an import": "import torn",
    "recursion": "def f(n):\n    return f(n + 1)\nf(0)",
    "unprintable": "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Odd",
    "traceback limit": "import sys; sys.tracebacklimit = 1\n" + DEEP + "outer()",
    "own hook": "import sys\nsys.excepthook = lambda *a: print(a[0].__name__, a[2].tb_frame.f_code.co_name)\n1 / 0",
    "exit None": "import sys; print('out'); sys.exit(None)",
    "exit 3": "import sys; print('out', file=sys.stderr); sys.exit(3)",
    "exit text": "import sys; sys.exit('told why')",
    "exit 259": "import sys; sys.exit(256 + 3)",
    "os._exit": "import atexit, os; atexit.register(print, 'never'); print('no newline', end=''); os._exit(5)",
    "abort": "import os; os.abort()",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not here')",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "faulthandler": "import faulthandler, os, signal\nfaulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)",
    "atexit order": "import atexit\nfor i in range(3): atexit.register(print, i)\nprint('first')",
    "atexit after an error": "import atexit; atexit.register(print, 'last words'); 1 / 0",
    "atexit raises": "import atexit; atexit.register(lambda: 1 / 0); print('first')",
    "atexit and a thread": "import atexit; atexit.register(print, 'last words')\n" + THREAD + "print('main is done')",
    "thread after an error": THREAD + "1 / 0",
    "thread's error": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "destructor": "class D:\n    def __del__(self):\n        print('deleted')\nd = D()",
    "unraisable": "class D:\n    def __del__(self):\n        1 / 0\nd = D()\ndel d",
    "open file": "f = open('left', 'w'); f.write('text')\nimport atexit; atexit.register(print, 'end')",
    "unwritten": "import sys; sys.stdout.write('no newline'); sys.stdout.buffer.write(b' bytes')",
    "closed fds": "import os; os.closerange(0, 100)",
    "warning": "import warnings\ndef f():\n    warnings.warn('careful')\nf()",
    "stdin": "import sys; print(repr(sys.stdin.read()))",
    "exec": "import os; os.execvp('sh', ['sh', '-c', 'echo $0; exit 8'])",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    1 / 0\nasyncio.run(f())",
    "bytes": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\nraise ValueError('\xe9')",
    "BOM": "\ufeffprint('after the mark')",
}
if sys.version_info >= (3, 11):
    ENDS["group"] = DEEP + (
        "try:\n    outer()\nexcept ZeroDivisionError as error:\n"
        "    raise ExceptionGroup('several', [error, ValueError('other')])"
    )
PROGRAMS = {
    "module that fails": ("-m", "broken"),
    "module that is not there": ("-m", "nosuchmodule"),
    "folder that fails": ("failing",),
    "no zip": ("wrong.zip",),
}
_ADDRESS = re.compile(rb"(?<=0x)[0-9a-f]+")


# Programs with a file of their own: those that are about the first line or compilation, and one plain script.
WHOLE_FILES = ("plain", "syntax", "bytes", "BOM")
RUNS = {
    "light": lambda name: (LIGHT, ("train.py",), ENDS[name]),
    "named": lambda name: (LIGHT, PROGRAMS[name]),
}
EXECED_ENDS = ("chained", "exit text", "SIGTERM")


class Ends:
    """How each program ends in both ways: as a turn of a shared job, or in a job of its own."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._turns = {
            "turn": self._taken("turns", LIGHT, [name for name in ENDS if name not in WHOLE_FILES]),
            "execed": self._taken("execed", FRESH, EXECED_ENDS),
        }

    def both(self, kind: str, name: str) -> tuple[End, End]:
        """The worker's end and the fresh interpreter's."""
        if kind in self._turns:
            return self._turns[kind].both(name)
        how, args, *text = RUNS[kind](name)
        folder = self._folder(f"{kind} {name}")
        encoding = "latin-1" if "latin-1" in "".join(text) else "utf-8"
        (folder / "train.py").write_bytes("".join(text).encode(encoding))
        return worker(folder, how, *args), fresh(folder, *args, env={"OMP_NUM_THREADS": share(1)})

    def _taken(self, name: str, how: tuple[str, ...], programs: Iterable[str]) -> Turns:
        return taken(self._folder(name), how, {name: ENDS[name] for name in programs})

    def _folder(self, name: str) -> Path:
        folder = self._base / name
        for path, content in HELPERS.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        return folder


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("ends").resolve())


PARAMS = [
    *(("light", name) for name in WHOLE_FILES),
    *(("turn", name) for name in ENDS if name not in WHOLE_FILES),
    *(("execed", name) for name in EXECED_ENDS),
    *(("named", name) for name in PROGRAMS),
]


@pytest.mark.parametrize("program", PARAMS, ids=lambda program: "-".join(program))
def test_a_worker_ends_as_a_fresh_interpreter_does(ends: Ends, program: tuple[str, str]) -> None:
    worker, fresh = ends.both(*program)

    assert (worker.code, worker.out) == (fresh.code, fresh.out)
    assert _ADDRESS.sub(b"", worker.err).decode() == _ADDRESS.sub(b"", fresh.err).decode()
