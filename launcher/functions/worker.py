"""The program of a function's workers: make the call, and leave its value for the process that asked for it."""

from __future__ import annotations

import os
import sys

from elaunch.launcher.functions.carried import read_call, write_start, write_value


def main(folder: str, call: str, results: str, local_rank: str) -> None:
    """`folder` has the open files of the job's process; `call` and `results` are their names, the latter by comma."""
    result = f"{folder}/{results.split(',')[int(local_rank)]}"
    with open(result, "wb") as file:  # noqa: PTH123
        write_start(file, int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"]))
    with open(f"{folder}/{call}", "rb") as file:  # noqa: PTH123
        function, args = read_call(file)
    try:
        value = function(*args)
    except SystemExit as ended:
        if ended.code:
            raise
        value = None
    with open(result, "r+b") as file:  # noqa: PTH123
        write_value(file, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
