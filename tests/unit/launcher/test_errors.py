"""Sentences for errors that end elaunch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError, tidy
from elaunch.launcher.options.commands import COMMANDS
from elaunch.launcher.options.options import parse
from elaunch.launcher.watch.command import STATUS
from tests.commands import read
from tests.harness import COMMAND, environment


def test_a_path_is_short_unless_a_link_on_its_way_makes_it_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path / "a")

    shown = [tidy(path) for path in ("./../x", "b//c/./d", "./run.sh", f"/{tmp_path}/a/../x", "../link/../x")]

    assert shown == ["../x", "b/c/d", "./run.sh", f"{tmp_path}/x", "../link/../x"]


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_each_command_names_the_option_that_was_meant_in_the_same_sentence(command: str) -> None:
    wrong, meant = {
        "": ("--nproc_pre_node", "--nproc-per-node"),
        "run": ("--nproc_pre_node", "--nproc-per-node"),
        "store": ("--lisen", "--listen"),
        "submit": ("--nods", "--nodes"),
        "rehearse": ("--stps", "--steps"),
        "warm": ("--statsu", "--status"),
        "top": ("--rnk", "--ranks"),
        **dict.fromkeys(("stop", "restart"), ("--tokn-file", "--token-file")),
    }.get(command, ("--jsn", "--json"))
    words = [command, "slurm"] if command == "submit" else [command] if command else []

    ended = subprocess.run([*COMMAND, *words, wrong], env=environment(), capture_output=True, text=True, timeout=60)

    assert ended.returncode == 2
    name = " ".join(["elaunch", *words[: 0 if command == "run" else None]])
    assert ended.stderr == f"elaunch: {wrong} is no option of {name}; did you mean {meant}?\n"


def test_an_option_of_another_command_is_not_suggested() -> None:
    with pytest.raises(UsageError, match=r"^--nproc-pre-node is no option of elaunch status; elaunch status --help "):
        read(STATUS, "--nproc-pre-node", "2")
    with pytest.raises(UsageError, match=r"^--jsn is no option of elaunch; elaunch --help lists the options$"):
        parse(["--jsn"], {})
