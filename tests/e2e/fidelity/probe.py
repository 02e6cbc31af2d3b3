"""A program that writes down what it finds, one JSON object per process.

Tests copy it as a script, module, package, directory or zip, and run it both by elaunch and by a fresh interpreter.
Each fact is a function. The kernel's facts are in probe_process.py, in the same folder. Imports are inside of the
functions, since an import at the top would change what other facts see.
"""

from __future__ import annotations

FIRST = dict(globals())

import os
import sys

TASKS = os.listdir("/proc/self/task")
FDS = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))

# Facts by name, in the order of their definition: facts that must be equal, and facts that must differ in each process.
FACTS = {}
UNLIKE = {}


def fact(look):
    FACTS[look.__name__] = look
    return look


def unlike(look):
    UNLIKE[look.__name__] = look
    return look


@fact
def argv():
    return [sys.argv, sys.orig_argv]


@fact
def path():
    return sys.path


@fact
def flags():
    names = [name for name in dir(sys.flags) if name[0] != "_" and not callable(getattr(sys.flags, name))]
    return {name: getattr(sys.flags, name) for name in names}


@fact
def options():
    return [sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.pycache_prefix, hasattr(sys, "ps1")]


@fact
def installation():
    return [
        sys.executable,
        sys._base_executable,
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        os.readlink("/proc/self/exe"),
    ]


@fact
def site_folders():
    import site

    return [site.ENABLE_USER_SITE, site.getusersitepackages(), site.getsitepackages()]


@fact
def customization():
    modules = [str(sys.modules.get(name)) for name in ("sitecustomize", "usercustomize")]
    return [modules, getattr(sys, "ran", "none of a test's")]


@fact
def folder():
    return os.getcwd()


@fact
def main_names():
    """The names in `__main__` before its first line."""
    return [list(FIRST), vars(sys.modules["__main__"]) is globals() or "imported"]


@fact
def main_values():
    def shown(name, value):
        if name == "__spec__" and value is not None:
            names = ("name", "origin", "cached", "parent", "has_location", "submodule_search_locations")
            return [str(getattr(value, n)) for n in names] + [type(value.loader).__qualname__]
        if name in ("__loader__", "__builtins__"):
            loader = type(value) if not isinstance(value, type) else value
            return [loader.__module__, loader.__qualname__, getattr(value, "path", None), getattr(value, "name", None)]
        return repr(value)

    return {name: shown(name, value) for name, value in FIRST.items() if name != "__doc__"}


@fact
def main_module():
    import types

    main = sys.modules["__main__"]
    return [main.__name__, type(main) is types.ModuleType, repr(main)]


@fact
def environ():
    return dict(os.environ)


@fact
def environ_of_a_child():
    """The environment as C code sees it, which a child process gets."""
    import subprocess

    printed = subprocess.run(["env", "-0"], stdout=subprocess.PIPE, check=True).stdout.decode(errors="surrogateescape")
    return dict(line.split("=", 1) for line in printed.split("\0") if line)


@fact
def import_hooks():
    return [
        [getattr(hook, "__name__", type(hook).__name__) for hook in hooks] for hooks in (sys.meta_path, sys.path_hooks)
    ]


@fact
def hooks():
    import threading

    return {
        "except": sys.excepthook is sys.__excepthook__,
        "display": sys.displayhook is sys.__displayhook__,
        "unraisable": sys.unraisablehook is sys.__unraisablehook__,
        "breakpoint": sys.breakpointhook is sys.__breakpointhook__,
        "thread": threading.excepthook is threading.__excepthook__,
        "trace": [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()],
        "async": [*sys.get_asyncgen_hooks(), sys.get_coroutine_origin_tracking_depth()],
        "last": [hasattr(sys, name) for name in ("last_type", "last_value", "last_traceback", "last_exc")],
        "handled": list(sys.exc_info()),
    }


@fact
def interpreter_settings():
    digits = getattr(sys, "get_int_max_str_digits", int)()
    return [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags(), digits]


@fact
def stack():
    import inspect
    import io
    import traceback

    text = io.StringIO()
    traceback.print_stack(file=text)
    return [[(f.filename, f.function, f.lineno) for f in inspect.stack()], text.getvalue().splitlines()]


@fact
def frames_of_all_threads():
    """The frames as faulthandler prints them, without the thread's address."""
    import faulthandler
    import re
    import tempfile

    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return re.sub("0x[0-9a-f]+", "0x", file.read()).splitlines()


@fact
def faulthandler_state():
    import faulthandler

    return faulthandler.is_enabled()


@fact
def threads():
    import threading

    main = threading.main_thread()
    return [
        len(TASKS),
        [thread.name for thread in threading.enumerate()],
        [main.name, type(main).__name__, main.daemon, main.is_alive(), main is threading.current_thread()],
        [main.ident == threading.get_ident(), main.native_id == os.getpid()],
    ]


@fact
def open_files():
    """The open files without the link, faulthandler's file and a library's own, which are documented."""
    link = int(os.environ.get("ELAUNCH_LINK", "-1"))
    files = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in FDS if fd != link}
    return [fd for fd, path in files.items() if "elaunch-crash" not in path and ".so" not in path]


@fact
def text_encoding():
    import locale

    return [
        [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding()],
        [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), locale.localeconv()],
    ]


@fact
def warning_filters():
    import warnings

    filters = [(f[0], str(f[1]), f[2].__name__, str(f[3]), f[4]) for f in warnings.filters]
    return [filters, warnings.defaultaction, warnings.onceregistry, warnings.showwarning.__module__]


@fact
def logging_root():
    import logging

    root = logging.getLogger()
    state = [root.level, root.disabled, [repr(h) for h in root.handlers], [repr(f) for f in root.filters]]
    return [state, logging.root.manager.disable, logging.getLoggerClass().__name__, logging.raiseExceptions]


@fact
def garbage_collector():
    import gc

    return [gc.isenabled(), gc.get_threshold(), [repr(c) for c in gc.callbacks], gc.get_debug(), gc.garbage]


@fact
def module_settings():
    """State that libraries keep and that a preloaded one may have changed."""
    import contextvars
    import decimal
    import socket
    import tempfile
    import threading

    return [
        [len(contextvars.copy_context()), repr(decimal.getcontext()), socket.getdefaulttimeout()],
        [threading.stack_size(), tempfile.tempdir],
    ]


@fact
def memory_tracing():
    import tracemalloc

    return tracemalloc.is_tracing()


@fact
def start_methods():
    import multiprocessing

    me = multiprocessing.current_process()
    return [multiprocessing.get_start_method(allow_none=True), me.name, me.daemon, multiprocessing.active_children()]


@fact
def source_of_a_main_function():
    import inspect
    import linecache

    return [inspect.getsource(fact), inspect.getsourcefile(fact), linecache.getline(__file__, 1)]


@fact
def code_of_a_main_function():
    return [fact.__code__.co_filename, fact.__module__, fact.__code__.co_flags]


class Point:
    def __init__(self, x):
        self.x = x


@fact
def pickled_main_class():
    import pickle

    again = pickle.loads(pickle.dumps(Point(7)))
    return [again.x, type(again) is Point, pickle.dumps(Point).decode("latin-1"), repr(Point)]


@fact
def module_beside_the_program():
    import probe_process as beside

    return [beside.__file__, beside.__spec__.cached, type(beside.__loader__).__name__, beside.__name__]


@fact
def seeded_random_numbers():
    import random

    return random.Random(1).random()


@unlike
def random_numbers():
    import random

    return random.random()


@unlike
def urandom():
    return os.urandom(8).hex()


@unlike
def uuid():
    import uuid

    return str(uuid.uuid4())


@unlike
def temporary_name():
    import tempfile

    return tempfile.mktemp()


@unlike
def multiprocessing_key():
    import multiprocessing

    return bytes(multiprocessing.current_process().authkey).hex()


def write_record(facts, name="facts"):
    """Write the record of this process: <name><rank>.json in the current folder."""
    import json

    found = {look.__name__: look() for look in facts}
    with open(f"{name}{os.environ.get('RANK', '')}.json", "w", encoding="utf-8") as file:
        json.dump(found, file, default=repr)


if __name__ == "__main__":
    look_inside = [*FACTS.values(), *UNLIKE.values()]
    import probe_process

    write_record([*probe_process.FACTS.values(), *look_inside])
