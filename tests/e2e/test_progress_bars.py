"""Progress bars of several workers at a terminal, and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import finished, script
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("without_torch")

LIGHT = ("--preload-only", "json", "--nproc-per-node", "2")
COLUMNS = 90
XTERM = {"TERM": "xterm-256color"}

# The width as shutil, tqdm before 4.70 (utils._screen_shape_linux) and rich find it.
WIDTHS = """
import os, shutil
from rich.console import Console

console = Console()
tqdm = [int(os.environ[name]) - 1 for name in ("COLUMNS", "LINES")] if "LINES" in os.environ else None
print("rank", os.environ["RANK"], shutil.get_terminal_size((1, 1)), tqdm, console.width, console.is_terminal)
print("tqdm", *map(os.environ.get, ("TQDM_NCOLS", "FORCE_COLOR", "CLICOLOR_FORCE")), flush=True)
"""


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


def test_workers_know_the_terminals_width_less_their_prefix(tmp_path: Path) -> None:
    script(tmp_path, WIDTHS)

    with Terminal(tmp_path, *LIGHT, "train.py", columns=COLUMNS, rows=40, env=XTERM) as terminal:
        assert terminal.read_all() == 0, terminal.text

    width = COLUMNS - len("[0] ")
    told = f"os.terminal_size(columns={width}, lines=40) [{width - 1}, 39] {width} True"
    assert sorted(line for line in terminal.shown() if "rank" in line) == [f"[{r}] rank {r} {told}" for r in range(2)]
    assert terminal.text.count(f"tqdm {width - 1} 1 1") == 2


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
