"""The program of a function's workers: make the call, and leave its value for the process that asked for it."""

from __future__ import annotations

import os
import sys

from elaunch.launcher.functions.carried import read_call, write_start, write_value

# Where the call and the values are on this node. The arguments are the same on all nodes.
VARIABLE = "ELAUNCH_CALL"


def main(name: str, local_rank: str) -> None:
    """Make the call. The variable has the folder of the agent's open files, the call's and the values' names there."""
    places = os.environ.pop(VARIABLE, "").split(",")
    if places == [""]:
        sys.exit(f"elaunch: {name} is a function, which only elaunch.launch can run; make the same call on this node")
    folder, call, *results = places
    result = f"{folder}/{results[int(local_rank)]}"
    with open(result, "wb") as file:  # noqa: PTH123
        write_start(file, int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"]))
    with open(f"{folder}/{call}", "rb") as file:  # noqa: PTH123
        function, args, named = read_call(file)
    try:
        value = function(*args, **named)
    except SystemExit as ended:
        if ended.code:
            raise
        value = None
    with open(result, "r+b") as file:  # noqa: PTH123
        write_value(file, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
