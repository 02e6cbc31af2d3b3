"""Progress bars of several workers at a terminal, and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import script
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload", "json", "--nproc-per-node", "2")
COLUMNS = 90
XTERM = {"TERM": "xterm-256color"}


def test_a_terminal_shows_the_states_of_a_rich_bar_with_its_ranks_prefix(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import os, time
from rich.progress import Progress

if os.environ["RANK"] == "0":
    with Progress(auto_refresh=False) as progress:
        task = progress.add_task("step", total=20)
        for step in range(20):
            progress.update(task, advance=1, refresh=True)
            time.sleep(0.02)
""",
    )

    with Terminal(tmp_path, *LIGHT, "train.py", columns=COLUMNS, rows=40, env=XTERM) as terminal:
        assert terminal.read_all() == 0, terminal.text

    states = {int(percent) for percent in re.findall(r"step .*?(\d+)%", terminal.text)}
    assert len(states) >= 10, terminal.text
    assert [re.sub(r"\W*━.*", "", line) for line in terminal.shown() if "%" in line] == ["[0] step"], terminal.shown()


def test_a_rank_that_is_killed_in_its_bar_leaves_a_terminal_with_a_cursor(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import os, signal, time
from rich.progress import Progress

with Progress() as progress:
    progress.add_task("step", total=20)
    if os.environ["RANK"] == "0":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
""",
    )

    with Terminal(tmp_path, *LIGHT, "--max-restarts", "0", "train.py", columns=COLUMNS, rows=40, env=XTERM) as terminal:
        assert terminal.read_all() == 1, terminal.text

    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")
