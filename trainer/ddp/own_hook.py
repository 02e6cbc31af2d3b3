"""A user's own communication hook: MODULE:NAME, a function, or a class whose objects have a state."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from elaunch.trainer.ddp.hooks import Hook
from elaunch.trainer.ddp.options import DdpError


def own_hook(name: str, group: Any) -> Hook:
    """The hook of that name for `group`. Raises DdpError with the way out if it is none.

    A function is called with the process group and the bucket, as torch's own are. A class is made once, with the
    process group; its object is called with the bucket, and its state_dict is kept.
    """
    module_name, _, attribute = name.partition(":")
    option = f"--comm-hook {name}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DdpError(f"{option}: {module_name} cannot be imported ({error}); put its folder on PYTHONPATH") from error
    found = getattr(module, attribute, None)
    if inspect.isclass(found):
        return _with_state(option, found, group)
    if not inspect.isroutine(found) or [*inspect.signature(found).parameters][1:] != ["bucket"]:
        raise DdpError(
            f"{option}: {module_name} has no function {attribute}(process_group, bucket), and no class {attribute} "
            "whose objects are called with a bucket"
        )
    return Hook(group, found)


def _with_state(option: str, kind: type, group: Any) -> Hook:
    state = kind(group)
    if not callable(state):
        raise DdpError(f"{option}: an object of {kind.__name__} cannot be called; give it __call__(self, bucket)")
    if not (hasattr(state, "state_dict") and hasattr(state, "load_state_dict")):
        raise DdpError(
            f"{option}: an object of {kind.__name__} has no state_dict() and load_state_dict(), so a restart would "
            "begin its state anew; give it both, or make it a function if it has no state"
        )

    # DDP asks for a parameter of this name.
    def own(own_state: Any, bucket):  # type: ignore[no-untyped-def]
        return own_state(bucket)

    own.__qualname__ = kind.__qualname__
    return Hook(state, own)
