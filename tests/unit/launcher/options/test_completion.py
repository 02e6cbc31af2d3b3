"""What a shell proposes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from elaunch.launcher.options.command_line import ELAUNCH, ParseState
from elaunch.launcher.options.table import TABLE
from tests.harness import RUN_LIMIT_S, environment


def items(*typed: str) -> list[CompletionItem]:
    """The proposals for the last argument."""
    complete = ShellComplete(ELAUNCH, {"obj": ParseState()}, "elaunch", "_ELAUNCH_COMPLETE")
    return complete.get_completions([*typed[:-1]], typed[-1])


def proposed(*typed: str) -> list[str]:
    return [item.value for item in items(*typed)]


def test_every_option_of_the_table_is_proposed() -> None:
    options = proposed("--")

    assert {f"--{name}" for spec in TABLE for name in spec.names} == set(options)
    assert proposed("--max-re") == ["--max-restarts"]
    assert proposed("submit", "slurm", "--part") == ["--partition"]
    assert proposed("status", "--j") == ["--json"]
    of_store = ["--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--run-id"]
    assert sorted(proposed("top", "--r")) == ["--ranks", *of_store]
    assert "--nproc-per-node" not in proposed("stacks", "--")
    assert proposed("store", "--") == ["--listen", "--token-file", "--help"]


def test_an_options_choices_are_proposed_as_its_value() -> None:
    assert proposed("--rdzv-backend", "etc") == ["etcd", "etcd-v2"]
    # As bash takes --rdzv-backend= apart.
    assert proposed("--rdzv-backend", "=") == ["static", "c10d", "etcd", "etcd-v2"]
    assert proposed("--numa-binding", "so") == ["socket"]
    assert proposed("--nnodes", "2") == []


def test_commands_are_proposed_where_a_program_may_stand_and_files_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert proposed("sub") == ["sub", "submit"]
    assert proposed("submit", "") == ["slurm", "k8s"]
    # What follows the program is the program's own.
    assert [item.type for item in items("train.py", "--max")] == ["file"]
    assert [item.type for item in items("--log-dir", "lo")] == ["dir"]
    (tmp_path / "submit.py").touch()
    assert [item.type for item in items("sub")] == ["file"]


@pytest.mark.parametrize(
    ("kind", "variables", "response"),
    [
        ("bash_complete", {"COMP_WORDS": "elaunch --max-re", "COMP_CWORD": "1"}, (0, b"plain,--max-restarts\n")),
        ("tcsh_source", {}, (2, b"")),
    ],
)
def test_a_shell_gets_its_proposals_by_a_variable(
    kind: str, variables: dict[str, str], response: tuple[int, bytes]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "elaunch"],
        env=environment({"_ELAUNCH_COMPLETE": kind, **variables}),
        capture_output=True,
        timeout=RUN_LIMIT_S,
    )

    assert (ended.returncode, ended.stdout) == response
