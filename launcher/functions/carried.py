"""The call on its way to the workers, and each worker's value on its way back, as pickles in files.

What can be imported by name is sent as a name, as multiprocessing does. All else needs cloudpickle.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing import process, spawn
from typing import IO, Any

# Of what multiprocessing tells a child about its parent: where modules are found, and what `__main__` is.
_MAIN = ("init_main_from_name", "init_main_from_path")
_TOLD = ("sys_path", "sys_argv", "orig_dir", "dir", *_MAIN)
# `__main__`, and `__mp_main__`, as the caller's is called in a worker.
_MAIN_NAME = b"_main__"


def write_call(file: IO[bytes], function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Write what `read_call` reads in a worker. Raises PicklingError with the way out.

    Raises multiprocessing's RuntimeError in a worker that is importing its main module: the script lacks a guard.
    """
    prepared = {key: value for key, value in spawn.get_preparation_data("").items() if key in _TOLD}
    data, is_by_value = _pickled(function, args, named)
    if is_by_value or _MAIN_NAME not in data:
        # Nothing in the call comes from the main module, so workers need not run it.
        prepared = {key: value for key, value in prepared.items() if key not in _MAIN}
    pickle.dump(prepared, file)
    file.write(data)


def read_call(file: IO[bytes]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Make this process like the one that called, and read the call: a function and its two kinds of arguments."""
    current: Any = process.current_process()
    current._inheriting = True
    try:
        spawn.prepare(pickle.load(file))
        called: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.load(file)
        return called
    finally:
        del current._inheriting


def write_start(file: IO[bytes], rank: int, generation: int) -> None:
    """Write that this rank of this generation has begun."""
    pickle.dump((rank, generation), file)


def write_value(file: IO[bytes], value: object) -> None:
    """Write what the call returned, behind the start; or why that cannot be pickled."""
    place = file.seek(0, os.SEEK_END)
    try:
        pickle.dump(None, file)
        _dump(value, file)
    except Exception as error:
        # Not raised: the job would run again, to the same end.
        file.seek(place)
        file.truncate()
        pickle.dump(f"a {type(value).__name__}, which cannot be pickled ({_words(error)})", file)


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
            f"rank {rank} ended with exit code 0 before {name} returned; let it return, and do not end it by os._exit"
        ) from None
    if problem:
        raise pickle.PicklingError(
            f"{name} returned on rank {rank} {problem}; return plain data or CPU tensors, or write a file"
        )
    try:
        return rank, pickle.load(file)
    except Exception as error:
        raise pickle.PicklingError(
            f"what {name} returned on rank {rank} cannot be read in this process ({_words(error)});"
            " return what can be imported and made here: plain data, CPU tensors"
        ) from error


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[bytes, bool]:
    """The call's pickle, and whether it has functions and classes by value, not by name."""
    call = (function, args, named)
    try:
        data = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
        if _MAIN_NAME not in data or _can_import_main():
            return data, False
        problem = "it is defined in a notebook, a console or a package's __main__, which workers cannot import"
    except Exception as error:
        # Pickling runs code of any object.
        problem = _words(error)
    cloudpickle = _cloudpickle()
    if cloudpickle is None:
        raise pickle.PicklingError(
            f"{name_of(function)} with its arguments cannot be sent to the workers: {problem}; pip install cloudpickle,"
            " or define it at the top level of a module"
        )
    try:
        return cloudpickle.dumps(call), True
    except Exception as error:
        raise pickle.PicklingError(
            f"{name_of(function)} with its arguments cannot be sent to the workers, not by cloudpickle either:"
            f" {_words(error)}; open files, locks and connections in the function, and give plain data"
        ) from error


def name_of(entrypoint: Callable[..., Any] | str) -> str:
    """The entrypoint's name in messages."""
    return entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__name__", type(entrypoint).__name__)


def _can_import_main() -> bool:
    """Whether `spawn.prepare` would make `__main__` in a worker: from a module's name, or from a script."""
    main = sys.modules["__main__"]
    if main.__spec__:
        return main.__spec__.name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")  # noqa: PTH113


def _dump(value: object, file: IO[bytes]) -> None:
    place = file.tell()
    try:
        pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
    except Exception:
        cloudpickle = _cloudpickle()
        if cloudpickle is None:
            raise
        file.seek(place)
        file.truncate()
        cloudpickle.dump(value, file)


def _cloudpickle() -> Any:
    """The library, which sends functions and classes by value; None if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
