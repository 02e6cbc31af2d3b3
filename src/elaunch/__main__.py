"""The command `elaunch`, and `python -m elaunch`: imports nothing before Ctrl-C is taken care of."""

import sys

from elaunch.interrupts import end_at_ctrl_c

_ELSEWHERE = (
    "elaunch: elaunch needs Linux 5.3 or newer, as in a container or WSL 2, and this is {}; torchrun takes the same"
    " command line"
)


def main() -> None:
    """The entry point. Its exit codes are those of `elaunch.launcher.cli`."""
    if sys.platform != "linux":
        # What follows imports modules that only Linux has.
        print(_ELSEWHERE.format(sys.platform), file=sys.stderr)
        sys.exit(2)
    end_at_ctrl_c()
    from elaunch.launcher.cli import main as run

    run()


if __name__ == "__main__":
    # Python put the current folder first; a json.py of the user's there is not ours to import.
    if sys.path and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    main()
