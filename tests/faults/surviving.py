"""Ranks of a gloo group that get SIGTERM, each in another state; run by each rank.

The variables SURVIVORS_FOLDER and SURVIVORS_SAVE_S are FOLDER and SECONDS. The rank of a kind is its place in `KINDS`,
and the agent's end of its link listens at FOLDER/link. Each rank writes its pid to FOLDER/KIND.pid when it is in its
state. FOLDER/begun is there before the signals are sent. A rank that saves takes SECONDS for that, then makes
FOLDER/KIND.saved and stays: an end would free its peers.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]
# These wait in a collective of all ranks, to which not all of them come.
STUCK = ("in_collective", "in_handler", "in_backward", "with_helpers")
# These save, each in another way.
SAVES = (
    *("writes", "sleeps", "waits_for_lock", "computes", "computes_in_c", "reads_pipe", "waits_for_child", "syncs"),
    *("in_group", "receives", "thread_saves", "thread_wakes_up", "timer_saves", "child_saves"),
    *("thread_waits_for_signal", "partner"),
)
# Rank 0 alone ends a monitored barrier by its timeout.
KINDS = ("timed_barrier", *STUCK, *SAVES)
FOLDER, SECONDS = Path(os.environ.get("SURVIVORS_FOLDER", "")), float(os.environ.get("SURVIVORS_SAVE_S", "0"))
PARTNER = KINDS.index("partner")


def slowly(kind: str) -> None:
    """Save: a little at a time, and wait between."""
    end_s = time.monotonic() + SECONDS
    with (FOLDER / kind).open("wb") as file:
        while time.monotonic() < end_s:
            file.write(bytes(1 << 12))
            file.flush()
            time.sleep(SECONDS / 4)


def saved(kind: str) -> None:
    (FOLDER / f"{kind}.saved").touch()
    while True:
        time.sleep(60)


def ready(kind: str) -> None:
    part = FOLDER / f"{kind}.part"
    part.write_text(str(os.getpid()))
    part.rename(FOLDER / f"{kind}.pid")


def broadcast(torch: Any) -> None:
    """Wait for a rank that does not come. An all-reduce would get the data of `in_backward`, of another size."""
    torch.distributed.broadcast(torch.ones(1), src=KINDS.index("sleeps"))


def begun() -> None:
    while not (FOLDER / "begun").exists():
        time.sleep(0.005)


def computes(_kind: str) -> None:
    end_s, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end_s:
        number += 1


def computes_in_c(_kind: str) -> None:
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)


def waits_for_lock(kind: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: (slowly(kind), lock.release())).start()
    lock.acquire()


def reads_pipe(_kind: str) -> None:
    with subprocess.Popen(["sleep", str(SECONDS)], stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.read()


def syncs(kind: str) -> None:
    end_s = time.monotonic() + SECONDS
    with (FOLDER / kind).open("wb") as file:
        while time.monotonic() < end_s:
            file.write(bytes(4 << 20))
            file.flush()
            os.fsync(file.fileno())


def do_save(kind: str, dist: Any, torch: Any, group: Any) -> None:
    """What the handler of this kind does in the main thread."""
    one = torch.ones(1)
    match kind:
        case "writes":
            slowly(kind)
        case "sleeps":
            time.sleep(SECONDS)
        case "waits_for_child":
            subprocess.run(["sleep", str(SECONDS)], check=True)
        case "in_group":
            dist.all_reduce(one, group=group)
        case "receives":
            dist.recv(one, PARTNER)
        case "partner":
            time.sleep(SECONDS)
            dist.all_reduce(one, group=group)
            dist.send(one, KINDS.index("receives"))
        case "timed_barrier":
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=SECONDS))
            except RuntimeError:
                return
        case _:
            globals()[kind](kind)


def in_background(kind: str) -> None:
    """Save in another thread or process, while the main thread waits for the other ranks in vain."""
    if kind == "timer_saves":
        threading.Timer(SECONDS, saved, (kind,)).start()
    elif kind == "child_saves" and os.fork() == 0:
        slowly(kind)
        saved(kind)


def prepare(kind: str, torch: Any) -> Handler:
    """What the process has before its signal; the handler of the signal."""
    dist = torch.distributed
    if kind in ("in_collective", "in_backward", "with_helpers"):
        if kind == "with_helpers":
            loader = torch.utils.data.DataLoader(range(8), num_workers=1, persistent_workers=True)
            globals()["kept"] = (iter(loader), ThreadPoolExecutor())
            globals()["kept"][1].submit(int).result()
        return lambda *_: saved(kind)
    if kind == "thread_saves":
        # As an asynchronous checkpoint that began before the signal.
        threading.Thread(target=lambda: (begun(), slowly(kind), saved(kind))).start()
        return lambda *_: None
    if kind == "thread_wakes_up":
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        threading.Thread(target=lambda: (os.read(read, 1), slowly(kind), saved(kind))).start()
        return lambda *_: None
    if kind == "thread_waits_for_signal":
        threading.Thread(target=lambda: (signal.sigwait({signal.SIGTERM}), slowly(kind), saved(kind))).start()
        return lambda *_: None
    group = dist.new_group([KINDS.index("in_group"), PARTNER], use_local_synchronization=True) if kind in (
        "in_group", "partner"
    ) else None  # fmt: skip

    def handle(*_: object) -> None:
        if kind in ("in_handler", "timer_saves", "child_saves"):
            in_background(kind)
            # As Lightning's handler does.
            broadcast(torch)
        else:
            do_save(kind, dist, torch, group)
            saved(kind)

    return handle


def wait_for_signal(kind: str, model: Any, torch: Any) -> None:
    if kind == "in_backward":
        model(torch.ones(1, 1)).sum().backward()
    elif kind in ("in_collective", "with_helpers", "thread_saves", "thread_wakes_up", "thread_waits_for_signal"):
        broadcast(torch)
    while True:
        time.sleep(0.005)


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from elaunch.agent.forkserver import collectives

    kind = KINDS[int(os.environ["RANK"])]
    if kind == "thread_waits_for_signal":
        # Before there is another thread, which would take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(FOLDER / "link"))
        link.sendall(json.dumps({"event": "phase", "name": kind}).encode() + b"\n")
        os.dup2(link.fileno(), collectives.LINK_FD)
    collectives.prepare(sys.modules[collectives.C10D])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    signal.signal(signal.SIGTERM, prepare(kind, torch))
    # All of them are here: nobody enters another collective before.
    dist.barrier()
    ready(kind)
    wait_for_signal(kind, model, torch)


if __name__ == "__main__":
    main()
