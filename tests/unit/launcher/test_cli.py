"""launcher.cli: a run that ends by an exception leaves nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elaunch.interrupts import raise_at_ctrl_c
from elaunch.launcher import cli
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import parse
from tests.harness import REPOSITORY, RUN_LIMIT_S, environment, free_ports, slow

# The agent's loop fails here, when everything that a run starts is there.
BROKEN = """
import contextlib, json, sys
import psutil
from elaunch.agent import loop

def broken(*_, **__):
    below = []
    for child in psutil.Process().children(recursive=True):
        # One may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            below.append([child.pid, " ".join(child.cmdline())])
    print(json.dumps(below), flush=True)
    raise FAULT

loop.Loop = broken
from elaunch.launcher.cli import main
main()
"""


# A simulation: an interpreter of Linux that takes itself for another system's, without the modules that only Unix has.
ELSEWHERE = """
import sys
sys.platform = "PLATFORM"
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios")))
from elaunch.__main__ import main
main()
"""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_on_another_system_the_command_is_one_sentence(platform: str) -> None:
    command = [sys.executable, "-c", ELSEWHERE.replace("PLATFORM", platform), "train.py"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"elaunch: elaunch needs Linux 5.3 or newer, as in a container or WSL 2, and this is {platform}; torchrun takes"
        " the same command line\n"
    )


@pytest.mark.parametrize(
    ("fault", "code"), [("RuntimeError('a fault of ours')", 1), ("KeyboardInterrupt", 130), slow("SystemExit(7)", 7)]
)
def test_whatever_ends_a_run_its_processes_and_folders_are_gone_before_it(
    tmp_path: Path, fault: str, code: int
) -> None:
    script, temporary = tmp_path / "t.py", tmp_path / "temporary"
    script.touch()
    temporary.mkdir()
    options = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_ports(1)[0]} --nproc-per-node 1 --preload json".split()

    ended = subprocess.run(
        [sys.executable, "-c", BROKEN.replace("FAULT", fault), *options, str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    left = [each for each in json.loads(ended.stdout) if psutil.pid_exists(each[0])]

    assert ended.returncode == code, ended.stderr
    started = " ".join(title for _, title in json.loads(ended.stdout))
    assert "guardian.py" in started
    assert not re.search("elaunch_[0-9a-f]{16}", started), "others could make these folders first"
    assert "elaunch: job store" in started
    assert left == []
    assert list(temporary.iterdir()) == []
    assert "on the other node type" in ended.stderr


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """The command takes Ctrl-C over when it has ended."""
    yield
    raise_at_ctrl_c()


# Interrupts the command where the module in argv[1] is imported.
_INTERRUPTED = """
import runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
interrupted = sys.argv[1]
sys.meta_path.insert(0, Finder())
sys.argv[:] = ["elaunch", "--no-such-option"]
if ENTRY == "-m":
    runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
else:
    from importlib.metadata import EntryPoint
    EntryPoint("elaunch", ENTRY, "console_scripts").load()()
"""


@pytest.mark.parametrize(
    ("entry", "module"), [("-m", "elaunch.launcher"), ("script", "elaunch.launcher.options.table")]
)
def test_a_ctrl_c_while_the_command_imports_ends_it_without_a_word(module: str, entry: str) -> None:
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    scripts = re.findall(r'^elaunch = "(.+)"$', pyproject, re.MULTILINE)
    assert len(scripts) == 1
    code = _INTERRUPTED.replace("ENTRY", repr(scripts[0] if entry == "script" else entry))

    ended = subprocess.run(
        [sys.executable, "-c", code, module], env=environment(), capture_output=True, text=True, timeout=180
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize(("command", "ends"), [("doctor", SystemExit), ("train.py", BrokenPipeError)])
def test_a_reader_that_has_read_enough_of_an_answer_is_no_error(
    monkeypatch: pytest.MonkeyPatch, command: str, ends: type[BaseException]
) -> None:
    def prints() -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_main", prints)
    monkeypatch.setattr(sys, "argv", ["elaunch", command])

    with pytest.raises(ends) as ended:
        cli.main()
    assert not isinstance(ended.value, SystemExit) or ended.value.code == 0


def test_the_options_of_the_bundled_trainer_are_shown_without_a_job(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "elaunch", "--nproc-per-node", "2", "--log-dir", "logs"]

    ended = subprocess.run(
        [*command, "-m", "elaunch.trainer", "--steps", "3", "--help"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Usage: elaunch -m elaunch.trainer")
    assert "--global-batch" in ended.stdout
    assert " elaunch.agent.run" not in ended.stderr, "an agent was begun"
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_command_line_has_exit_code_2_with_stderr_closed_too() -> None:
    command = f"exec {sys.executable} -m elaunch --no-such-option 2>&-"

    assert subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL, timeout=RUN_LIMIT_S).returncode == 2


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--ssh-command", "no-such -p 2"], "--ssh-command no-such is not an executable file on PATH; give its path"),
        (["--scheduler", "slurm"], "--scheduler slurm contradicts --hosts, which needs no scheduler; drop one of them"),
        (["--node-rank", "0"], "--node-rank is about one node, and --hosts starts all of them; drop one of them"),
        (["--no-restart-codes", "9,255"], "--no-restart-codes 255: ssh has this exit code for a lost connection;"),
        (["--nnodes", "2:3"], r"--nnodes 2:3 contradicts the number of hosts \(1\); drop it, or change the hosts"),
    ],
)
def test_what_the_hosts_cannot_do_is_one_sentence(argv: list[str], sentence: str) -> None:
    options = parse(["--hosts", "node1", *argv, "t.py"], {})

    with pytest.raises(UsageError, match=sentence):
        cli.run(options, {})
