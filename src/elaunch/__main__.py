"""`python -m elaunch`: the same command as `elaunch`."""

import sys

if __name__ == "__main__":
    # Python put the current folder first; a json.py of the user's there is not ours to import.
    if sys.path and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    from elaunch.launcher.cli import main

    main()
