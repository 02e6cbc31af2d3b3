"""The words that a shell proposes, in real shells too."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from elaunch.launcher.options.command_line import Reading
from elaunch.launcher.options.commands import ELAUNCH
from elaunch.launcher.options.table import TABLE
from tests.harness import DEADLINE_S, RUN_LIMIT_S, environment

# One column for each line of the answer, and no paging of long lists.
TERMINAL = {"TERM": "dumb", "COLUMNS": "200", "LINES": "100", "PS1": "$ ", "HISTFILE": "/dev/null"}
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(_ELAUNCH_COMPLETE=bash_source elaunch)"'),
    "zsh": (
        ["zsh", "-f", "-i"],
        'autoload -Uz compinit; compinit -u -D; eval "$(_ELAUNCH_COMPLETE=zsh_source elaunch)"',
    ),
}


def items(*typed: str) -> list[CompletionItem]:
    """The proposals for the last of the words."""
    complete = ShellComplete(ELAUNCH, {"obj": Reading()}, "elaunch", "_ELAUNCH_COMPLETE")
    return complete.get_completions([*typed[:-1]], typed[-1])


def words(*typed: str) -> list[str]:
    return [item.value for item in items(*typed)]


def test_every_option_of_the_table_is_proposed() -> None:
    proposed = words("--")

    assert {f"--{name}" for spec in TABLE for name in spec.names} == set(proposed)
    assert words("--max-re") == ["--max-restarts"]
    assert words("submit", "slurm", "--part") == ["--partition"]
    assert words("status", "--j") == ["--json"]
    assert sorted(words("top", "--r")) == [
        "--ranks",
        "--rdzv-backend",
        "--rdzv-conf",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--run-id",
    ]
    assert "--nproc-per-node" not in words("stacks", "--")
    assert words("store", "--") == ["--listen", "--token-file", "--help"]


def test_an_options_own_words_are_proposed_as_its_value() -> None:
    assert words("--store", "") == ["auto", "memory", "etcd"]
    assert words("--rdzv-backend", "etc") == ["etcd", "etcd-v2"]
    # As bash takes --store= apart.
    assert words("--store", "=") == ["auto", "memory", "etcd"]
    assert words("--numa-binding", "so") == ["socket"]
    assert words("--nnodes", "2") == []


def test_commands_are_proposed_where_a_program_may_stand_and_files_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert words("sub") == ["sub", "submit"]
    assert words("submit", "") == ["slurm", "k8s"]
    # What follows the program is the program's own.
    assert [item.type for item in items("train.py", "--max")] == ["file"]
    assert [item.type for item in items("--log-dir", "lo")] == ["dir"]
    (tmp_path / "submit.py").touch()
    assert [item.type for item in items("sub")] == ["file"]


def test_a_word_that_no_shell_says_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "elaunch"],
        env=environment({"_ELAUNCH_COMPLETE": "tcsh_source"}),
        capture_output=True,
        timeout=RUN_LIMIT_S,
    )

    assert (ended.returncode, ended.stdout) == (2, b"")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_in_a_real_shell_completes_an_option_and_its_value(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command, hook = START[shell]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    with _Terminal(command, tmp_path, environment({**TERMINAL, "PATH": path})) as terminal:
        terminal.type(f"{hook}; echo rea''dy\n")
        terminal.wait_for("ready")
        terminal.type("elaunch --max-re\t")
        terminal.wait_for(r"elaunch --max-restarts ")
        terminal.type("0 --store mem\t")
        terminal.wait_for(r"--store memory")


class _Terminal:
    """A shell on a pseudo-terminal; `type` presses keys, `wait_for` reads what the shell shows."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._shown = ""

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        os.close(self._ours)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, pattern: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self._shown):
            assert time.monotonic() < end_s, self._shown
            if select.select([self._ours], [], [], 0.1)[0]:
                self._shown += os.read(self._ours, 65536).decode(errors="replace")
