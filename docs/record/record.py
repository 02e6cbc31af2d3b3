"""Record the README's picture: a real job that loses a rank and goes on, with the times at which its lines came.

    python docs/record/record.py docs/images/lost-rank.svg

A pseudo-terminal runs elaunch, pyte shows what a person would see, and each line gets the second in which it
appeared. Once rank 0 has printed `step 20`, rank 1 is killed as from another terminal. Nothing is edited but the width
of long lines. The picture is an SVG without fonts or scripts of others; where animations are shown, lines come in at
the recorded times.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyte

COLUMNS = 112
ROWS = 40
# What a worker writes to stderr goes to a file: here the traceback of the rank that lost its peer.
TYPED = "elaunch --nproc-per-node 2 --log-dir logs --redirects 2 train.py"
# The victim's death is the second terminal's; the loss of rank 0 would take the lines with it.
KILL_AFTER = "step 20:"
VICTIM = r"pid (\d+) is rank 1"
DEADLINE_S = 120
CHARACTER, LINE, MARGIN, TOP = 8.4, 20, 16, 44


@dataclass(frozen=True)
class Shown:
    """One line of the picture; `is_typed` says that a person typed it."""

    at_s: float
    text: str
    is_typed: bool = False


def main(picture: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = list(record(Path(folder)))
    picture.write_text(svg(lines))
    for line in lines:
        print(f"{line.at_s:6.2f} s  {line.text}")


def record(folder: Path) -> Iterator[Shown]:
    """Run the job in `folder` and kill rank 1; the lines in the order in which they appeared."""
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    ours, theirs = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    began_s = time.monotonic()
    job = subprocess.Popen(
        TYPED.split(),
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    yield Shown(0.0, f"$ {TYPED}", is_typed=True)
    screen = pyte.Screen(COLUMNS * 2, ROWS)
    stream = pyte.ByteStream(screen)
    seen = 0
    pid = 0
    is_killed = False
    while (data := _read(ours, began_s)) is not None:
        stream.feed(data)
        # Whole lines only: the cursor's own may still grow.
        for row in range(seen, screen.cursor.y):
            text = screen.display[row].rstrip()
            now_s = time.monotonic() - began_s
            yield Shown(now_s, text)
            if found := re.search(VICTIM, text):
                pid = int(found[1])
            if KILL_AFTER in text and not is_killed:
                is_killed = True
                yield Shown(now_s, f"$ kill -9 {pid}          # rank 1, from another terminal", is_typed=True)
                os.kill(pid, signal.SIGKILL)
        seen = max(seen, screen.cursor.y)
    code = job.wait()
    yield Shown(time.monotonic() - began_s, "$ echo $?", is_typed=True)
    yield Shown(time.monotonic() - began_s, str(code))
    assert is_killed, "the job ended before a rank could be killed"
    assert code == 0, f"the job ended with {code}"


def _read(terminal: int, began_s: float) -> bytes | None:
    """What the terminal got; None at its end."""
    left_s = DEADLINE_S - (time.monotonic() - began_s)
    assert select.select([terminal], [], [], max(left_s, 0))[0], "the job does not end"
    try:
        return os.read(terminal, 65536) or None
    except OSError:
        return None


def svg(lines: list[Shown]) -> str:
    """The picture: a time for each line, and an animation that shows each line when it came."""
    rows = [(line if part == 0 else Shown(line.at_s, ""), text) for line in lines for part, text in _wrapped(line)]
    height = TOP + LINE * len(rows) + MARGIN
    width = round(CHARACTER * (COLUMNS + 9) + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{TYPED}: rank 1 is killed, and the job goes on</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#16181d"/>',
        *(f'<circle cx="{18 + 18 * i}" cy="20" r="6" fill="{c}"/>' for i, c in enumerate(_LIGHTS)),
    ]
    for row, (line, text) in enumerate(rows):
        y = TOP + LINE * row + 14
        at = f"{line.at_s:.2f} s" if line.text else ""
        parts.append(
            f'<g class="{_kind(text, line)}" style="animation-delay:{line.at_s:.2f}s">'
            f'<text class="at" x="{MARGIN + CHARACTER * 7:.0f}" y="{y}">{at}</text>'
            f'<text x="{MARGIN + CHARACTER * 9:.0f}" y="{y}" xml:space="preserve">{escape(text)}</text></g>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


_LIGHTS = ("#ff5f57", "#febc2e", "#28c840")
_STYLE = (
    "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dae0}"
    ".at{fill:#7a808c;text-anchor:end}.typed text{fill:#fff;font-weight:bold}.ours text{fill:#7fd1ff}"
    ".bad text{fill:#ff8c82}.good text{fill:#8fe08f}g .at.at{fill:#7a808c;font-weight:normal}"
    "@keyframes come{from{opacity:0}to{opacity:1}}"
    "@media(prefers-reduced-motion:no-preference){g{animation:come .05s both}}"
)


def _kind(text: str, line: Shown) -> str:
    if line.is_typed:
        return "typed"
    if "killed by" in text:
        return "bad"
    if "goes on after" in text:
        return "good"
    return "ours" if text.startswith("elaunch:") else "worker"


def _wrapped(line: Shown) -> Iterator[tuple[int, str]]:
    """The line in pieces of COLUMNS, as a terminal shows it; their numbers."""
    text = line.text
    yield from enumerate([text[i : i + COLUMNS] for i in range(0, len(text), COLUMNS)] or [""])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
