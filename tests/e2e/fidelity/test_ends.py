"""A worker ends as a fresh interpreter does: exit code, stdout and stderr, byte for byte."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.e2e.fidelity.turns import Turns, taken
from tests.e2e.fidelity.ways import EXECED, LIGHT, End, fresh, share, worker
from tests.harness import script, slow

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
    "top level": "raise RuntimeError('at the top\\nin two lines')",
    "in an import": "import broken",
    "missing import": "import nosuchmodule",
    "missing name": "from helper import multiply",
    "syntax": "def f(:\n    pass",
    "indentation": "if 1:\n  a\n b",
    "null byte": "x = 1\0\n",
    "syntax in an import": "import torn",
    "syntax in exec": "exec('x = (')",
    "own class": "class Own(Exception):\n    pass\nraise Own",
    "local class": "def f():\n    class Own(Exception):\n        pass\n    raise Own(1, 2)\nf()",
    "note": "e = ValueError('x')\ngetattr(e, 'add_note', print)('a note')\nraise e",
    "recursion": "def f(n):\n    return f(n + 1)\nf(0)",
    "depth": "def f(n):\n    try:\n        return f(n + 1)\n    except RecursionError:\n        return n\nprint(f(0))",
    "unprintable": "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Odd",
    "without a traceback": "e = ValueError('x')\ndef f():\n    raise e.with_traceback(None) from None\nf()",
    "base exception": "raise BaseException('base')",
    "generator exit": "raise GeneratorExit",
    "memory": "x = bytearray(1 << 62)",
    "traceback limit": "import sys; sys.tracebacklimit = 1\n" + DEEP + "outer()",
    "printed traceback": DEEP
    + "import traceback\ntry:\n    outer()\nexcept ZeroDivisionError:\n    traceback.print_exc()",
    "logged traceback": DEEP
    + "import logging\ntry:\n    outer()\nexcept ZeroDivisionError:\n    logging.exception('oh')",
    "printed stack": "import traceback\ndef f():\n    traceback.print_stack()\nf()",
    "last exception": "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1 / 0",
    "own hook": "import sys\nsys.excepthook = lambda *a: print(a[0].__name__, a[2].tb_frame.f_code.co_name)\n1 / 0",
    "own failing hook": "import sys\ndef hook(*a):\n    raise KeyError('in the hook')\nsys.excepthook = hook\n1 / 0",
    "exit None": "import sys; print('out'); sys.exit(None)",
    "exit 3": "import sys; print('out', file=sys.stderr); sys.exit(3)",
    "exit text": "import sys; sys.exit('told why')",
    "exit tuple": "import sys; sys.exit((1, 2))",
    "exit True": "import sys; sys.exit(True)",
    "exit 259": "import sys; sys.exit(256 + 3)",
    "exit 256": "import sys; sys.exit(256)",
    "exit -1": "import sys; sys.exit(-1)",
    "quit": "quit()",
    "exit in a function": "import sys\ndef f():\n    try: sys.exit(4)\n    finally: print('finally')\nf()",
    "os._exit": "import atexit, os; atexit.register(print, 'never'); print('no newline', end=''); os._exit(5)",
    "abort": "import os; os.abort()",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not here')",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "SIGUSR1": "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)",
    "SIGPIPE": "import os, signal; os.kill(os.getpid(), signal.SIGPIPE); print('ignored')",
    "closed pipe": "import os\nr, w = os.pipe(); os.close(r); os.write(w, b'x')",
    "faulthandler": "import faulthandler, os, signal\nfaulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)",
    "faulthandler of a signal": "import faulthandler, os, signal\nfaulthandler.register(signal.SIGUSR1)\n"
    "def f(): os.kill(os.getpid(), signal.SIGUSR1)\nf()",
    "faulthandler after a time": "import faulthandler, time\n"
    "faulthandler.dump_traceback_later(1, exit=True)\ntime.sleep(99)",
    "atexit order": "import atexit\nfor i in range(3): atexit.register(print, i)\nprint('first')",
    "atexit after an error": "import atexit; atexit.register(print, 'last words'); 1 / 0",
    "atexit after an exit": "import atexit, sys; atexit.register(print, 'last words'); sys.exit(6)",
    "atexit raises": "import atexit; atexit.register(lambda: 1 / 0); print('first')",
    "atexit exits": "import atexit, sys; atexit.register(lambda: sys.exit(7)); print('first')",
    "atexit and a thread": "import atexit; atexit.register(print, 'last words')\n" + THREAD + "print('main is done')",
    "thread after an error": THREAD + "1 / 0",
    "thread's error": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()",
    "thread's exit": "import sys, threading\nthreading.Thread(target=lambda: sys.exit(3)).start()",
    "daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "destructor": "class D:\n    def __del__(self):\n        print('deleted')\nd = D()",
    "unraisable": "class D:\n    def __del__(self):\n        1 / 0\nd = D()\ndel d",
    "unraisable at the end": "class D:\n    def __del__(self):\n        1 / 0\nd = D()",
    "open file": "f = open('left', 'w'); f.write('text')\nimport atexit; atexit.register(print, 'end')",
    "unwritten": "import sys; sys.stdout.write('no newline'); sys.stdout.buffer.write(b' bytes')",
    "closed stdout": "import sys; sys.stdout.close()",
    "closed fds": "import os; os.closerange(0, 100)",
    "warning": "import warnings\ndef f():\n    warnings.warn('careful')\nf()",
    "deprecation": "import warnings\nwarnings.warn('old', DeprecationWarning)\nx = 1 is 1",
    "resource": "def f(): open('/dev/null')\nf()",
    "stdin": "import sys; print(repr(sys.stdin.read()))",
    "input": "input('? ')",
    "forked child": "import os\npid = os.fork()\nif pid == 0: raise ValueError('the child only')\n"
    "print('child ended with', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "forked child's exit": "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(9)\nprint(os.waitpid(pid, 0)[1])",
    "exec": "import os; os.execvp('sh', ['sh', '-c', 'echo $0; exit 8'])",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    1 / 0\nasyncio.run(f())",
    "task never awaited": "async def f(): pass\nf()",
    "bytes": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\nraise ValueError('\xe9')",
    "future import": "from __future__ import annotations\ndef f(x: nosuch): pass\nprint(f.__annotations__)",
    "main's annotations": "x: int = 3\nprint(__annotations__)",
    "empty": "",
    "BOM": "\ufeffprint('after the mark')",
    "CRLF": "def f():\r\n    1 / 0\r\nf()\r\n",
}
if sys.version_info >= (3, 11):
    ENDS["group"] = DEEP + (
        "try:\n    outer()\nexcept ZeroDivisionError as error:\n"
        "    raise ExceptionGroup('several', [error, ValueError('other')])"
    )
# Programs that import torch. The fork server or the script itself imports it.
TORCH_ENDS = {
    "in a thread of torch": "import torch\nx = torch.ones(2, requires_grad=True)\n"
    "x.register_hook(lambda g: 1 / 0)\nx.sum().backward()",
}
PROGRAMS = {
    "module that fails": ("-m", "broken"),
    "module with a syntax error": ("-m", "torn"),
    "module that is not there": ("-m", "nosuchmodule"),
    "module of a package that is not there": ("-m", "nosuch.module"),
    "module of a module": ("-m", "helper.inner"),
    "package that fails": ("-m", "torn_pack.inner"),
    "package without a main": ("-m", "mainless"),
    "folder that fails": ("failing",),
    "no zip": ("wrong.zip",),
}
_ADDRESS = re.compile(rb"(?<=0x)[0-9a-f]+")


# Programs with a file of their own: those that are about the first line or compilation, and one plain script.
WHOLE_FILES = (
    *("plain", "syntax", "indentation", "null byte", "bytes", "future import", "empty", "BOM", "CRLF"),
    "main's annotations",
)
RUNS = {
    "light": lambda name: (LIGHT, ("train.py",), ENDS[name]),
    "torch": lambda name: (("--preload", "torch"), ("train.py",), TORCH_ENDS[name]),
    "named": lambda name: (LIGHT, PROGRAMS[name]),
}
EXECED_ENDS = ("chained", "exit text", "SIGTERM")
# Each of these needs a job of its own, and is like another one.
RARE = (
    *("indentation", "future import", "empty", "CRLF", "main's annotations"),
    *("module with a syntax error", "module of a package that is not there", "module of a module"),
    *("package that fails", "package without a main"),
)


class Ends:
    """How each program ends in both ways: as a turn of a shared job, or in a job of its own."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._turns = {
            "turn": self._taken("turns", LIGHT, [name for name in ENDS if name not in WHOLE_FILES]),
            "execed": self._taken("execed", EXECED, EXECED_ENDS),
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
    *(slow(("light", name)) if name in RARE else ("light", name) for name in WHOLE_FILES),
    *(("turn", name) for name in ENDS if name not in WHOLE_FILES),
    *(slow(("torch", name)) for name in TORCH_ENDS),
    *(("execed", name) for name in EXECED_ENDS),
    *(slow(("named", name)) if name in RARE else ("named", name) for name in PROGRAMS),
]


@pytest.mark.parametrize("program", PARAMS, ids=lambda program: "-".join(program))
def test_a_worker_ends_as_a_fresh_interpreter_does(ends: Ends, program: tuple[str, str]) -> None:
    worker, fresh = ends.both(*program)

    assert (worker.code, worker.out) == (fresh.code, fresh.out)
    assert _ADDRESS.sub(b"", worker.err).decode() == _ADDRESS.sub(b"", fresh.err).decode()


def test_a_death_by_sigint_is_named_so(tmp_path: Path) -> None:
    script(tmp_path, "raise KeyboardInterrupt")

    end = worker(tmp_path, LIGHT, "train.py")

    assert end.code == -2
    assert "SIGINT" in end.said_by_agent
