"""The user's settings for Python: options, PYTHON* variables, sitecustomize, .pth, PYTHON_EXEC; a script on stdin."""

from __future__ import annotations

import os
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.habits import fresh, same, worker
from tests.harness import FRESH, LIGHT, script

SAY = """
import sys, warnings
def shown(value):
    return [repr(f).split(" at ")[0] for f in value]
print(sys.flags)
print(sys.warnoptions, sorted(sys._xoptions.items()), __debug__, sys.dont_write_bytecode)
print(sys.path, sys.pycache_prefix, hasattr(sys, "ps1"))
print([f[:1] + f[2:3] for f in warnings.filters])
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through, sys.stderr.errors, sys.stdin.encoding)
import os
print({n: v for n, v in os.environ.items() if n.startswith("PYTHON")})
import faulthandler, sys
# A worker has it enabled always, but not on stderr, which only the user can ask for (docs/fidelity.md).
if os.environ.get("PYTHONFAULTHANDLER") or "faulthandler" in sys._xoptions:
    print("faulthandler", faulthandler.is_enabled())
import helper, shutil
if helper.__cached__ and os.path.exists(helper.__cached__):
    print("bytecode", helper.__cached__)
    os.remove(helper.__cached__)
print("w\\xf6rds")
"""

OPTIONS = {
    "-W": ("-W", "error::UserWarning", "-W", "ignore::DeprecationWarning"),
    "-Wonce": ("-Wonce",),
    "-X dev": ("-X", "dev"),
    "-X utf8": ("-X", "utf8=0", "-X", "faulthandler"),
    "-X own": ("-X", "mine=1", "-X", "also"),
    "-W and -X": ("-W", "error::DeprecationWarning", "-X", "dev"),
    "-X int_max_str_digits": ("-X", "int_max_str_digits=5000"),
}

VARIABLES = {
    "PYTHONWARNINGS": "default,error::FutureWarning",
    "PYTHONDEVMODE": "1",
    "PYTHONOPTIMIZE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPYCACHEPREFIX": "caches",
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONSTARTUP": "startup.py",
    "PYTHONNOUSERSITE": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONINSPECT": "",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONBREAKPOINT": "0",
}


# Options and variables that one interpreter can have at once. SHOWN has the output that shows that each took effect.
OPTIONS_AT_ONCE = (("-W", "-X utf8", "-X own", "-X int_max_str_digits"), ("-Wonce", "-X dev"), ("-W and -X",))
VARIABLES_AT_ONCE = (
    ("PYTHONDEVMODE", "PYTHONPYCACHEPREFIX", "PYTHONINSPECT", "PYTHONUTF8"),
    ("PYTHONSAFEPATH",),
    (
        *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONIOENCODING"),
        *("PYTHONSTARTUP", "PYTHONNOUSERSITE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONBREAKPOINT"),
    ),
)
SHOWN = {
    "-W": "['error::UserWarning', 'ignore::DeprecationWarning']",
    "-Wonce": "'once'",
    "-X dev": "dev_mode=True",
    "-X utf8": "utf8_mode=0",
    "-X own": "('also', True)",
    "-W and -X": "'error::DeprecationWarning'",
    "-X int_max_str_digits": "int_max_str_digits=5000",
    "PYTHONWARNINGS": "['default', 'error::FutureWarning']",
    "PYTHONDEVMODE": "dev_mode=True",
    "PYTHONOPTIMIZE": "optimize=1",
    "PYTHONDONTWRITEBYTECODE": "dont_write_bytecode=1",
    "PYTHONPYCACHEPREFIX": "bytecode caches/",
    "PYTHONSAFEPATH": "safe_path=True",
    "PYTHONIOENCODING": "iso8859-1 replace",
    "PYTHONNOUSERSITE": "no_user_site=1",
    "PYTHONFAULTHANDLER": "faulthandler True",
    "PYTHONUTF8": "utf8_mode=1",
    "PYTHONHASHSEED": "hash_randomization=1",
}


def shown(folder: Path, *python: str, env: Mapping[str, str] | None = None, no_preload: bool = False) -> str:
    """The settings that a program prints, which are the same in a fresh interpreter and in workers."""
    script(folder, "", "helper.py")
    script(folder, SAY)
    script(folder, "print('startup ran')\n", "startup.py")
    found = same(folder, "train.py", python=(sys.executable, *python), env=env, no_preload=no_preload)
    return found.out.decode("latin-1")


@pytest.mark.parametrize("names", OPTIONS_AT_ONCE, ids=", ".join)
def test_the_interpreters_options_are_the_workers(tmp_path: Path, names: tuple[str, ...]) -> None:
    # Python gets the words of a worker that is not forked in the same way whatever they are.
    twice = names == OPTIONS_AT_ONCE[0]

    logged = shown(tmp_path, *(word for name in names for word in OPTIONS[name]), no_preload=twice)

    assert [name for name in names if SHOWN[name] not in logged] == []


@pytest.mark.parametrize("names", VARIABLES_AT_ONCE, ids=", ".join)
def test_a_variable_for_python_has_its_effect(tmp_path: Path, names: tuple[str, ...]) -> None:
    logged = shown(tmp_path, env={name: VARIABLES[name] for name in names})

    assert [name for name in names if f"'{name}': '{VARIABLES[name]}'" not in logged] == []
    assert [name for name in names if SHOWN.get(name, "") not in logged] == []
    assert "startup ran" not in logged


# A .pth file or sitecustomize that leaves one line per run, and marks the interpreter.
SITECUSTOMIZE = """
import builtins, os, sys
with open({log!r}, "a") as log:
    log.write(f"{{os.getpid()}}\\n")
builtins.habit = "of the site"
sys.path.append("/appended/by/site")
os.environ["SET_BY_SITE"] = "yes"
"""


class TestSitecustomize:
    def test_it_runs_once_for_all_workers_of_a_node(self, tmp_path: Path) -> None:
        env = _site(tmp_path, SITECUSTOMIZE.format(log=str(tmp_path / "log")))
        script(
            tmp_path,
            "import os\nprint(os.getpid(), os.getppid(), flush=True)\n"
            "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n",
        )

        run = worker(tmp_path, "train.py", how=(*LIGHT, "--max-restarts", "1"), env=env)

        assert run.code == 0, str(run)
        ran_in = (tmp_path / "log").read_text().split()
        workers = [line.split() for line in run.out.decode().splitlines()]
        assert len(workers) == 2
        for pid, fork_server in workers:
            assert pid not in ran_in
            assert ran_in.count(fork_server) == 1
        # The launcher is a Python program too, and runs it once. No other process runs it.
        assert len(ran_in) <= 2


class TestVirtualEnvironment:
    def test_python_exec_names_another_environments_interpreter(self, tmp_path: Path) -> None:
        venv.create(tmp_path / "other", with_pip=False, symlinks=True)
        python = str(tmp_path / "other" / "bin" / "python")
        script(
            tmp_path,
            "import importlib.util, sys\nprint(sys.argv, sys.prefix, sys.executable, importlib.util.find_spec('torch'),"
            " importlib.util.find_spec('elaunch'), sys.flags, sys.path)\n",
        )
        expected = fresh(tmp_path, "train.py", "--lr", "1", python=(python,))

        run = worker(tmp_path, "train.py", "--lr", "1", how=("--nproc-per-node", "1"), env={"PYTHON_EXEC": python})

        assert (run.code, run.out) == (0, expected.out), str(run)
        assert b"None None" in run.out
        assert len([line for line in run.logged if python in line]) == 1, str(run)


def _site(folder: Path, text: str) -> dict[str, str]:
    place = folder / "site"
    place.mkdir()
    script(place, text + "\n", "sitecustomize.py")
    return {"PYTHONPATH": os.fspath(place)}


SCRIPTS = {
    "no newline at the end": "print('logged')",
    "no text": "# w\xf6rds\nprint('w\xf6rds')\n",
    "nothing": "",
    "syntax error": "print('not this')\ndef f(:\n",
    "long": "x = 0\n" + "x += 1\n" * 20_000 + "print(x)\n",
}
# These also run with --no-preload, where Python itself reads the bytes.
TWICE = ("no text", "long")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_on_stdin_runs_as_python_runs_it(tmp_path: Path, name: str) -> None:
    same(tmp_path, "-", "--lr", "0.1", stdin=SCRIPTS[name].encode(), no_preload=name in TWICE)


@pytest.mark.parametrize("how", [LIGHT, FRESH], ids=["forked", "no-preload"])
def test_every_worker_of_every_generation_has_the_whole_script(tmp_path: Path, how: tuple[str, ...]) -> None:
    text = (
        "import os, sys, time\n"
        "rank, generation = os.environ['RANK'], os.environ['ELAUNCH_GENERATION']\n"
        "print('here', rank, generation, sys.argv[1:], repr(sys.stdin.read()), flush=True)\n"
        "open(f'up{rank}{generation}', 'w').close()\n"
        "while not os.path.exists(f'up{1 - int(rank)}{generation}'): time.sleep(0.005)\n"
        "if rank == '1' and generation < '2': os.kill(os.getpid(), 9)\n"
        "if generation < '2': time.sleep(60)\n"
    )

    options = (*how, "--nproc-per-node", "2", "--max-restarts", "2")
    run = worker(tmp_path, "-", "-x", how=options, stdin=text.encode())

    assert run.code == 0, str(run)
    expected = [f"[{rank}] here {rank} {generation} ['-x'] ''" for generation in range(3) for rank in range(2)]
    assert sorted(run.out.decode().splitlines()) == sorted(expected)
