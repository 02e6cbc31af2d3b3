"""The program of a function's workers: make the call, and store its value for the caller.

The call and each worker's value are pickles in files. What can be imported by name is sent as a name, as
multiprocessing does. All else needs cloudpickle.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import process, spawn
from typing import IO, Any

# Where the call and the values are on this node. The arguments are the same on all nodes.
VARIABLE = "ELAUNCH_CALL"

# The part of multiprocessing's preparation data that sets where modules are found, and what `__main__` is.
_MAIN = ("init_main_from_name", "init_main_from_path")
_PREPARED = ("sys_path", "sys_argv", "orig_dir", "dir", *_MAIN)
# Matches `__main__`, and `__mp_main__`, its name in a worker.
_MAIN_NAME = b"_main__"


def main(name: str, local_rank: str) -> None:
    """Make the call. The variable has the folder of the agent's open files, the call's and the values' names there."""
    files = os.environ.pop(VARIABLE, "").split(",")
    if files == [""]:
        sys.exit(f"elaunch: {name} is a function, which only elaunch.launch can run; make the same call on this node")
    folder, _, call, *results = files
    result = f"{folder}/{results[int(local_rank)]}"
    with open(result, "wb") as file:  # noqa: PTH123
        pickle.dump((int(os.environ["RANK"]), int(os.environ["ELAUNCH_GENERATION"])), file)
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


def write_call(file: IO[bytes], function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Write what `read_call` reads in a worker. Raises PicklingError with the way out.

    Raises multiprocessing's RuntimeError in a worker that is importing its main module: the script lacks a guard.
    """
    prepared = {key: value for key, value in spawn.get_preparation_data("").items() if key in _PREPARED}
    try:
        data, is_by_value = _dumps((function, args, named), can_import_main=_can_import_main())
    except Exception as error:
        # Pickling runs code of any object.
        raise pickle.PicklingError(
            f"{name_of(function)} with its arguments cannot be sent to the workers: {error}; pip install cloudpickle,"
            " or define it at the top level of a module, and open files, locks and connections in it"
        ) from error
    if is_by_value or _MAIN_NAME not in data:
        # Nothing in the call comes from the main module, so workers need not run it.
        prepared = {key: value for key, value in prepared.items() if key not in _MAIN}
    pickle.dump(prepared, file)
    file.write(data)


def read_call(file: IO[bytes]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Prepare this process as the caller's child, and read the call: a function, its positional and named arguments."""
    current: Any = process.current_process()
    current._inheriting = True
    try:
        spawn.prepare(pickle.load(file))
        called: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.load(file)
        return called
    finally:
        del current._inheriting


def write_value(file: IO[bytes], value: object) -> None:
    """Append what the call returned, or why that cannot be pickled."""
    file.seek(0, os.SEEK_END)
    try:
        data, problem = _dumps(value)[0], None
    except Exception as error:
        # Not raised: a restart would fail in the same way.
        data, problem = b"", f"a {type(value).__name__}, which cannot be pickled ({type(error).__name__}: {error})"
    pickle.dump(problem, file)
    file.write(data)


def read_value(file: IO[bytes], generation: int, name: str) -> tuple[int, Any] | None:
    """The rank that wrote here in that generation, and its value; None if no rank did.

    Raises PicklingError for a value that was not written or cannot be read, EOFError if the call did not return.
    """
    file.seek(0)
    try:
        rank, written_in = pickle.load(file)
    except EOFError:
        return None
    if written_in != generation:
        return None
    try:
        problem = pickle.load(file)
    except EOFError:
        raise EOFError(
            f"rank {rank} ended with exit code 0 before {name} returned; let it return, and do not end it with os._exit"
        ) from None
    if problem:
        raise pickle.PicklingError(
            f"{name} returned on rank {rank} {problem}; return plain data or CPU tensors, or write a file"
        )
    try:
        return rank, pickle.load(file)
    except Exception as error:
        raise pickle.PicklingError(
            f"what {name} returned on rank {rank} cannot be read in this process ({type(error).__name__}: {error});"
            " return what can be imported and made here: plain data, CPU tensors"
        ) from error


def _dumps(value: object, *, can_import_main: bool = True) -> tuple[bytes, bool]:
    """The pickle, and whether cloudpickle made it. Raises what the pickling raises."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if _MAIN_NAME in data and not can_import_main:
            raise pickle.PicklingError(
                "it is defined in a notebook, a console or a package's __main__, which workers cannot import"
            )
    except Exception:
        # Imported here: it is optional.
        with suppress(ModuleNotFoundError):
            import cloudpickle

            return cloudpickle.dumps(value), True
        raise
    return data, False


def name_of(entrypoint: Callable[..., Any] | str) -> str:
    """The entrypoint's name in messages."""
    return entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__name__", type(entrypoint).__name__)


def _can_import_main() -> bool:
    """Whether `spawn.prepare` can recreate `__main__` in a worker: from a module's name, or from a script."""
    main = sys.modules["__main__"]
    if main.__spec__:
        return main.__spec__.name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")  # noqa: PTH113


if __name__ == "__main__":
    main(*sys.argv[1:])
