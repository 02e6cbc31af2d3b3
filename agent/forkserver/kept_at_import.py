"""What a module finds out about its process when it is imported, and can find out again in each worker.

Two habits of libraries are known. Lightning's keep the rank as an attribute of a function:

    rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)

and have a log handler of their own if the program has set up no logging before:

    if not logging.getLogger().hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False

A fork server takes the attribute away after its imports, and the statement runs again in the worker that imports the
module. There the handler goes too, if the program has set up logging by then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from elaunch.agent.forkserver.lookups import up_to_text
from elaunch.records import dataclass

if TYPE_CHECKING:
    import logging

_TEXT = "<module>"


@dataclass(frozen=True)
class RankStatement:
    """A statement of a module's text that keeps the rank as an attribute of one of the module's functions."""

    module: str
    function: str
    text: str

    def forget(self, module: ModuleType) -> None:
        """Make it as if the statement had not run."""
        with suppress(AttributeError):
            del vars(module)[self.function].rank

    def run(self, module: ModuleType) -> None:
        """Run it in this process. Raises what it raises in a fresh interpreter."""
        exec(compile(self.text, module.__file__ or self.module, "exec"), vars(module))


@dataclass(frozen=True)
class OwnHandler:
    """A log handler that a module has added when it found none of the program's. `propagate` is from before."""

    module: str
    logger: logging.Logger
    handler: logging.Handler
    propagate: bool

    def forget_if_too_many(self) -> None:
        """Remove it if the module would not have added it here."""
        # The module that imported it has loaded this one too.
        if sys.modules["logging"].getLogger().hasHandlers():
            self.logger.removeHandler(self.handler)
            self.logger.propagate = self.propagate


def rank_statement(frame: FrameType) -> RankStatement | None:
    """The statement for which `frame` looks up a variable; None if it is for anything else."""
    # Imported here: most programs need it for nothing.
    import ast

    text = [*up_to_text(frame)][-1]
    spec = text.f_globals.get("__spec__")
    if text.f_code.co_name != _TEXT or spec is None:
        return None
    try:
        line = spec.loader.get_source(spec.name).splitlines()[text.f_lineno - 1]
        # One that is indented may run only now and then.
        body = ast.parse(line).body
    except (ImportError, OSError, AttributeError, IndexError, SyntaxError, ValueError):
        return None
    match body:
        case [
            ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id=function), attr="rank")],
                value=ast.Call(
                    func=ast.Name(id="getattr"), args=[ast.Name(id=same), ast.Constant(value="rank"), _], keywords=[]
                ),
            )
        ] if function == same:
            return RankStatement(spec.name, function, line)
    return None


@contextmanager
def handlers_noted(noted: list[OwnHandler]) -> Iterator[None]:
    """Note the log handlers that modules add in their text, where they have found before that there are none."""
    # Imported here: a program need not have it loaded at its start.
    import logging

    logger: Any = logging.Logger
    has_handlers, add_handler = logger.hasHandlers, logger.addHandler
    asked: set[str] = set()

    def recorded_has_handlers(self: Any) -> Any:
        answer, frame = has_handlers(self), sys._getframe(1)
        if self is logging.getLogger() and not answer and frame.f_code.co_name == _TEXT:
            asked.add(frame.f_globals["__name__"])
        return answer

    def recorded_add_handler(self: Any, handler: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name == _TEXT and (name := frame.f_globals["__name__"]) in asked:
            noted.append(OwnHandler(name, self, handler, self.propagate))
        add_handler(self, handler)

    logger.hasHandlers, logger.addHandler = recorded_has_handlers, recorded_add_handler
    try:
        yield
    finally:
        logger.hasHandlers, logger.addHandler = has_handlers, add_handler
