"""The fork server: a single-threaded process that has imported what workers need and forks them from itself.

Started by `forkserver.ForkServer` with the environment that the workers will have. It is their parent: it reaps them
and tells the agent. Where forking would not be faithful it starts anew without preloading, forks a small process for
each worker and has that exec a fresh interpreter; the rest is the same.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from elaunch.agent import wire
from elaunch.agent.children import Children
from elaunch.agent.linux import die_with_parent, set_command_line

# Read when torch or numpy is imported, and wrong for a process that forks: BLAS would start its threads, torch would
# open CUDA to see whether it is there. The children get the user's values back.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Boot:
    """What the agent tells its template at birth.

    `script_dir` is where the program's own modules are looked for first, or empty. `preload` is None for exec.
    """

    agent_pid: int
    control_fd: int
    kind: str
    target: str
    args: tuple[str, ...]
    interpreter: str
    script_dir: str
    preload: tuple[str, ...] | None
    fallback: str = ""


@dataclass(frozen=True)
class Child:
    """What a freshly forked process is to become."""

    boot: Boot
    order: dict[str, Any]
    fds: tuple[int, ...]
    template_pid: int
    restore_environment: dict[str, str | None]
    restore_mask: frozenset[int]


def main(boot_fd: int, loaded_at_start: Collection[str]) -> None:
    """Serve until the agent is gone. In a forked child this returns only after the child's program has ended."""
    mask = frozenset(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    # A scheduler signals every process of a job. Blocked, not ignored: what a child inherits must be the defaults.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGCHLD})
    boot = _read_boot(boot_fd)
    die_with_parent(boot.agent_pid, signal.SIGKILL)
    set_command_line(("elaunch: fork server",), "elaunch-fork")
    control = socket.socket(fileno=boot.control_fd)
    control.set_inheritable(False)
    before = dict(os.environ)
    os.environ.update(_WHILE_IMPORTING)
    reason = "" if boot.preload is None else _preload(boot, loaded_at_start)
    # torch._inductor makes its cache folder when it is imported; a script that never compiles would not have it.
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR") if "TORCHINDUCTOR_CACHE_DIR" not in before else None:
        with suppress(OSError):
            os.rmdir(cache)  # noqa: PTH106
    # Imports write variables too; after torch._dynamo's a script's own setdefault would come too late.
    restore = {n: before.get(n) for n in {*before, *os.environ} if os.environ.get(n) != before.get(n)}
    if reason:
        _start_anew(boot, reason, restore)
    _tell(control, {"event": "ready", "reason": boot.fallback})
    gc.collect()
    gc.freeze()
    child = _serve(boot, control, restore, mask)
    if child:
        # Its number is the program's from here on; closing it as ours would close what has it by then.
        control.detach()
        from elaunch.agent import child as birth

        birth.become(child)


def _read_boot(fd: int) -> Boot:
    with open(fd, "rb", closefd=False) as file:
        fields = json.load(file)
    os.lseek(fd, 0, os.SEEK_SET)
    preload = fields["preload"]
    return Boot(**{**fields, "args": tuple(fields["args"]), "preload": None if preload is None else tuple(preload)})


def _preload(boot: Boot, loaded_at_start: Collection[str]) -> str:
    """Import; the reason why workers must not be forked from here, or the empty string."""
    assert boot.preload is not None
    known = _open_files().keys()
    try:
        for name in boot.preload:
            importlib.import_module(name)
    except Exception as error:
        return f"importing {name} failed: {type(error).__name__}: {error}"
    if shadow := _shadow(Path(boot.script_dir), loaded_at_start) if boot.script_dir else None:
        return f"{shadow} has the name of a module that was preloaded"
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return "a preloaded module started a thread"
    # A worker's descriptors are its own from 4 on: what a module holds open, a GPU or a file, would be taken from it.
    if held := next((path for fd, path in _open_files().items() if fd not in known), None):
        return f"a preloaded module keeps {held} open"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module started CUDA"
    return ""


def _open_files() -> dict[int, str]:
    """This process's open descriptors and what they refer to."""
    files: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # The one that listed them is gone by now.
        with suppress(OSError):
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def _shadow(script_dir: Path, loaded_at_start: Collection[str]) -> Path | None:
    """A file beside the script that a fresh interpreter would import in place of what was preloaded, if any."""
    loaded = {name for name in sys.modules if "." not in name} - set(loaded_at_start) - set(sys.builtin_module_names)
    suffixes = importlib.machinery.all_suffixes()
    try:
        entries = list(os.scandir(script_dir))
    except OSError:
        return None
    for entry in entries:
        suffix = next((s for s in suffixes if entry.name.endswith(s)), None)
        name = entry.name.removesuffix(suffix) if suffix else entry.name
        if name in loaded and (suffix or (Path(entry.path) / "__init__.py").exists()):
            ours = getattr(sys.modules[name], "__file__", None)
            if ours is None or not Path(ours).is_relative_to(script_dir):
                return Path(entry.path)
    return None


def _start_anew(boot: Boot, reason: str, environment: dict[str, str | None]) -> NoReturn:
    """Become a template that execs every worker; nothing that was imported stays."""
    for name, value in environment.items():
        _set_variable(name, value)
    fields = {**boot.__dict__, "preload": None, "fallback": reason}
    boot_fd = os.memfd_create("elaunch-boot", 0)
    os.write(boot_fd, json.dumps(fields).encode())
    os.lseek(boot_fd, 0, os.SEEK_SET)
    os.set_inheritable(boot.control_fd, True)
    argv = [*sys.orig_argv[:-2], str(boot_fd), sys.orig_argv[-1]]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(signal.Signals))
    os.execv(sys.executable, argv)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _serve(boot: Boot, control: socket.socket, restore: dict[str, str | None], mask: frozenset[int]) -> Child | None:
    """Fork, signal and reap as the agent asks, until it is gone (None). Returns what to become in every child."""
    wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    children = Children()
    template_pid = os.getpid()
    while True:
        ready = [key.fileobj for key, _ in selector.select(children.look_s)]
        if wake_r in ready:
            os.read(wake_r, 4096)
        for news in children.ended():
            _tell(control, news)
        if control not in ready:
            continue
        packet = wire.receive(control)
        if packet is None:
            return None
        order, fds = packet
        match order["op"]:
            case "ask":
                _tell(control, {"event": "here"})
            case "signal":
                children.signal((order["generation"], order["key"]), order["signum"], order["group"])
            case _:
                name = (order["generation"], order["key"])
                try:
                    pid = os.fork()
                except OSError as error:
                    _tell(control, {"event": "unstarted", "generation": name[0], "key": name[1], "why": error.strerror})
                else:
                    if pid == 0:
                        selector.close()
                        return Child(boot, order, fds, template_pid, restore, mask)
                    children.add(pid, name)
                for fd in fds:
                    os.close(fd)


def _tell(control: socket.socket, news: dict[str, Any]) -> None:
    try:
        wire.send(control, news)
    except (BrokenPipeError, ConnectionResetError):
        # The agent is on its way out, and so are this process and its children.
        os._exit(1)
