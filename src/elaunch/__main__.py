"""`python -m elaunch`: the same command as `elaunch`."""

from elaunch.launcher.cli import main

if __name__ == "__main__":
    main()
