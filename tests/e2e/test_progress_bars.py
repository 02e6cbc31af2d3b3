"""Progress bars of several workers at a terminal, and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import finished, script
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload", "json", "--nproc-per-node", "2")
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

# The width as shutil, tqdm before 4.70 (utils._screen_shape_linux) and rich find it.
WIDTHS = """
import os, shutil
from rich.console import Console

console = Console()
tqdm = [int(os.environ[name]) - 1 for name in ("COLUMNS", "LINES")] if "LINES" in os.environ else None
print("rank", os.environ["RANK"], shutil.get_terminal_size((1, 1)), tqdm, console.width, console.is_terminal)
print("tqdm", *map(os.environ.get, ("TQDM_NCOLS", "FORCE_COLOR", "CLICOLOR_FORCE")), flush=True)
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


def test_workers_know_the_terminals_width_less_their_prefix(tmp_path: Path) -> None:
    script(tmp_path, WIDTHS)

    with Terminal(tmp_path, *LIGHT, "train.py", columns=COLUMNS, rows=40, env=XTERM) as terminal:
        assert terminal.read_all() == 0, terminal.text

    width = COLUMNS - len("[0] ")
    told = f"os.terminal_size(columns={width}, lines=40) [{width - 1}, 39] {width} True"
    assert sorted(line for line in terminal.shown() if "rank" in line) == [f"[{r}] rank {r} {told}" for r in range(2)]
    assert terminal.text.count(f"tqdm {width - 1} 1 1") == 2


def test_the_users_own_variables_stay(tmp_path: Path) -> None:
    script(tmp_path, WIDTHS)
    own = {**XTERM, "COLUMNS": "70", "TTY_COMPATIBLE": "0"}

    with Terminal(tmp_path, *LIGHT, "train.py", columns=COLUMNS, rows=40, env=own) as terminal:
        assert terminal.read_all() == 0, terminal.text

    assert "[1] rank 1 os.terminal_size(columns=70, lines=40) [69, 39] 70 False" in terminal.shown()


@pytest.mark.parametrize("form", ["a pipe", "json", "a dumb terminal"])
def test_without_a_terminal_workers_are_told_nothing_of_one(form: str, tmp_path: Path) -> None:
    names = ("COLUMNS", "LINES", "TTY_COMPATIBLE", "TQDM_NCOLS", "FORCE_COLOR", "CLICOLOR_FORCE", "PYTHON_COLORS")
    script(tmp_path, f"import os\nprint('told', [name for name in {names} if name in os.environ])")

    if form == "a pipe":
        shown = finished(tmp_path, *LIGHT, "train.py").stdout
    else:
        options, term = (("--log-format", "json"), "xterm") if form == "json" else ((), "dumb")
        with Terminal(tmp_path, *LIGHT, *options, "train.py", columns=200, env={"TERM": term}) as terminal:
            assert terminal.read_all() == 0, terminal.text
        shown = terminal.text

    assert shown.count("told []") == 2, shown


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


def test_the_prefix_of_torchs_traceback_is_not_doubled_on_the_console_and_stays_in_the_file(tmp_path: Path) -> None:
    # As torch.distributed.init_process_group sets sys.excepthook.
    script(
        tmp_path,
        """
import os, sys, time
if os.environ["RANK"] == "1":
    for line in ("Traceback (most recent call last):", "  Here", "ValueError: bad batch"):
        print(f"[rank1]: {line}", file=sys.stderr)
    sys.exit(1)
time.sleep(60)
""",
    )

    job = finished(tmp_path, *LIGHT, "--max-restarts", "0", "--log-dir", "logs", "train.py")

    assert "\n[1] ValueError: bad batch\n" in job.stderr, job.stderr
    assert "[1] [rank1]" not in job.stderr
    (file,) = (tmp_path / "logs").glob("latest/*/1/stderr.log")
    assert "[rank1]: ValueError: bad batch\n" in file.read_text()
