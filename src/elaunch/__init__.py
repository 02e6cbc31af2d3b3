"""elaunch: start PyTorch training jobs and keep them alive.

`elaunch.launch(LaunchConfig(…), function)(*args)` runs a function on all ranks: see docs/functions.md.
"""

__version__ = "0.1.0"

# `typing` itself is not imported: each worker imports this before its program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from elaunch.launcher.functions.launch import ChildFailedError as ChildFailedError
    from elaunch.launcher.functions.launch import JobFailed as JobFailed
    from elaunch.launcher.functions.launch import LaunchConfig as LaunchConfig
    from elaunch.launcher.functions.launch import elastic_launch as elastic_launch
    from elaunch.launcher.functions.launch import launch as launch

_FUNCTIONS = ("LaunchConfig", "ChildFailedError", "JobFailed", "elastic_launch", "launch")


def __getattr__(name: str) -> object:
    """Import the launcher of functions on first use: the command and the workers do without it."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.launcher.functions.launch"), name)
