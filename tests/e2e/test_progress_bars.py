"""Progress bars of several workers at a terminal, and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import script
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload-only", "json", "--nproc-per-node", "2")
COLUMNS = 90
XTERM = {"TERM": "xterm-256color"}

# Rank 0 has a bar of two rows, as Lightning has while it validates; rank 1 prints lines between its states.
BAR = """
import os, pathlib, time
from rich.progress import Progress

def until(count):
    while len(list(pathlib.Path().glob("step_*"))) < count:
        time.sleep(0.002)

if os.environ["RANK"] == "0":
    with Progress(auto_refresh=False) as progress:
        outer, inner = progress.add_task("epoch", total=2), progress.add_task("step", total=20)
        for step in range(20):
            progress.update(inner, advance=1)
            progress.update(outer, completed=step // 10 + 1)
            progress.refresh()
            pathlib.Path(f"step_{step}").touch()
            time.sleep(0.02)
        progress.console.print("trained")
else:
    for step in range(20):
        until(step + 1)
        print("line", step, flush=True)
"""


def test_a_terminal_shows_each_state_of_a_rich_bar_and_no_other_ranks_line_suffers(tmp_path: Path) -> None:
    script(tmp_path, BAR)

    with Terminal(tmp_path, *LIGHT, "train.py", columns=COLUMNS, rows=40, env=XTERM) as terminal:
        assert terminal.read_all() == 0, terminal.text
    shown = terminal.shown()

    states = {int(percent) for percent in re.findall(r"step .*?(\d+)%", terminal.text)}
    assert len(states) >= 15, terminal.text
    assert [line for line in shown if "line" in line] == [f"[1] line {step}" for step in range(20)]
    # The last state, once, with its prefix, and as wide as the terminal allows.
    bars = [line for line in shown if "%" in line]
    assert [re.sub(r"\W*━.*", "", bar) for bar in bars] == ["[0] epoch", "[0] step"], shown
    assert "[0] trained" in shown
    # In colour.
    assert re.search(r"\x1b\[[\d;]*m━", terminal.text), terminal.text
    # The cursor is back.
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")


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
