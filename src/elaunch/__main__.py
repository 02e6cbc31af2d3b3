"""The command `elaunch`, and `python -m elaunch`: imports nothing before Ctrl-C is taken care of."""

import sys

from elaunch.interrupts import end_at_ctrl_c


def main() -> None:
    """The entry point. Its exit codes are those of `elaunch.launcher.cli`."""
    end_at_ctrl_c()
    from elaunch.launcher.cli import main as run

    run()


if __name__ == "__main__":
    # Python put the current folder first; a json.py of the user's there is not ours to import.
    if sys.path and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    main()
