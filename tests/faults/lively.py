"""A worker without torch that only counts steps, so that a test can follow a job through a hundred restarts a minute.

Run as `lively.py FOLDER`. A few times a second it writes its generation, its pid and a count to FOLDER/life-<node>, and
reports the count as its step. FOLDER/end ends it well. The node is what the test has set as LIVELY_NODE.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

from elaunch.trainer import link

FOLDER, NODE, GENERATION = Path(sys.argv[1]), os.environ["LIVELY_NODE"], os.environ["ELAUNCH_GENERATION"]
BEAT_S = 0.1


def main() -> None:
    life = FOLDER / f"life-{NODE}"
    partial = life.with_suffix(".part")
    for step in itertools.count():
        partial.write_text(f"{GENERATION} {os.getpid()} {step}")
        partial.rename(life)
        link.report(step)
        if (FOLDER / "end").exists():
            return
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main()
