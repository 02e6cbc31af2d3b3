"""Tells the variables that a module keeps when it is imported from those that its functions look up again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from opcode import opmap
from types import CodeType, FrameType
from typing import Any

from elaunch.agent.forkserver.replay_environment import LOGGING

# What goes through the whole environment, as tqdm does when it is imported, looks for names that it knows by itself.
_GO_THROUGH_ALL = {each.__code__ for each in (ItemsView.__iter__, ValuesView.__iter__, type(os.environ).copy)}


class EnvironmentCopies:
    """Tells the lookups of `dict(os.environ)` from others: for the names that it knows, a module may copy all.

    Python asks for the names there, and then looks up each, all in one instruction.
    """

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None

    def watched(self, names: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`names`, the method that gives the names of all variables, for a recording."""

        def watched_names(environ: Any) -> Any:
            self._place = _place(sys._getframe(1))
            return names(environ)

        return watched_names

    def has(self, frame: FrameType) -> bool:
        """Whether a lookup in `frame` is a part of such a copy."""
        return self._place == _place(frame)


def _place(frame: FrameType) -> tuple[int, int]:
    return id(frame), frame.f_lasti


def walks(frame: FrameType) -> bool:
    """Whether a lookup in `frame` is a part of a walk through the whole environment."""
    return frame.f_code in _GO_THROUGH_ALL


def keeper(variable: str, frame: FrameType) -> str | None:
    """The module that has the value of `variable` from a lookup in `frame`, during an import; None if none keeps it.

    A module keeps what its own text looks up while it is loaded. A function of a loaded module that names the variable
    itself, such as `torch.cuda.is_available`, looks it up whenever it is called. Unless it stores the answer: then its
    module is the keeper. A helper that is told the variable's name reads it for the module that names it.
    """
    if walks(frame):
        return None
    while frame.f_back and _module(frame).partition(".")[0] in sys.stdlib_module_names:
        # A module of the standard library reads a variable for its caller.
        frame = frame.f_back
    owner = next((each for each in up_to_text(frame) if _names(each.f_code, variable)), None)
    if owner is None:
        return _module(frame)
    loads = getattr(owner.f_globals.get("__spec__"), "_initializing", False)
    asks_again = not loads and not _stores(owner) and _module(owner) != LOGGING
    return None if asks_again else _module(owner)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def up_to_text(frame: FrameType) -> Iterator[FrameType]:
    """`frame` and its callers, to the one that runs a module's text."""
    each: FrameType | None = frame
    while each is not None:
        yield each
        each = None if each.f_code.co_name == "<module>" else each.f_back


def _names(code: CodeType, variable: str) -> bool:
    return any(variable == known or (type(known) is tuple and variable in known) for known in code.co_consts)


def _stores(frame: FrameType) -> bool:
    """Whether a function remembers its answer: in a global variable, or by a cache around it."""
    function: Any = frame.f_globals.get(frame.f_code.co_name)
    return hasattr(function, "cache_info") or opmap["STORE_GLOBAL"] in frame.f_code.co_code[::2]
