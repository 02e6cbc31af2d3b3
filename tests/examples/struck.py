"""`struck.py TEXT PROGRAM …` runs PROGRAM. In generation 0 rank 1 kills itself where it comes to the line with TEXT."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

TEXT, PROGRAM = sys.argv[1], Path(sys.argv[2])


def strike(frame: FrameType, event: str, argument: object) -> Any:
    """Follow the program's own frames only; each new line of them comes here before it runs."""
    if frame.f_code.co_filename != str(PROGRAM):
        return None
    if event == "line" and frame.f_lineno == LINE:
        os.kill(os.getpid(), signal.SIGKILL)
    return strike


(LINE,) = [number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if TEXT in line]
if (os.environ["RANK"], os.environ["ELAUNCH_GENERATION"]) == ("1", "0"):
    sys.settrace(strike)
sys.argv = sys.argv[2:]
# As Python does for a program: others beside it can be imported.
sys.path[0] = str(PROGRAM.parent)
runpy.run_path(str(PROGRAM), run_name="__main__")
