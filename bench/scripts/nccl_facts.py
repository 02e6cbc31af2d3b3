"""Facts that need NCCL with two ranks, which may share one GPU; without a GPU those that gloo has. No launcher.

Prints each experiment's facts as they come, and at the end `facts` and a JSON object.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# An all-reduce of so many floats takes a tenth of a second or more through sockets.
LARGE = 64 << 20
# How long a survivor is observed, and any rank waits.
LIMIT_S = 12.0
HELD_BYTES = 8 << 30

FORKING = multiprocessing.get_context("fork")
Facts = dict[str, Any]
# Called in each rank with a barrier of both; the ranks' results are merged.
Experiment = Callable[[Any], Facts]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    on_gpu = has_gpu()
    facts: Facts = {"backend": "nccl" if on_gpu else "gloo"}
    # Gloo does not read the variable.
    for handling in "0123" if on_gpu else "3":
        # The watchdog waits four times as long before it aborts, or before 3 ends the process that is observed. Through
        # NVLink an all-reduce would be over before the kill.
        wait_ms = "15000" if handling == "3" else "100"
        env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": wait_ms}
        sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
        facts |= experiment(f"killed_{handling}", killed, env | sockets)
    for each in (beside, context, ahead):
        facts |= experiment(each.__name__, each)
    if on_gpu:
        facts |= memory_returns()
    print("facts", json.dumps(facts), flush=True)


def has_gpu() -> bool:
    """Ask in a forked process: CUDA that was initialized here would be broken in all others."""
    process = FORKING.Process(target=lambda: os._exit(0 if torch.cuda.is_available() else 2))
    process.start()
    process.join(LIMIT_S)
    return process.exitcode == 0


def experiment(name: str, run: Experiment, env: Mapping[str, str] | None = None) -> Facts:
    """Fork two ranks that run it, and print what they return. If it fails, the other experiments still run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both, queue = FORKING.Barrier(2), FORKING.SimpleQueue()
    ranks = [FORKING.Process(target=run_rank, args=(rank, port, run, env or {}, both, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    found: Facts = {}
    for process in ranks:
        process.join(3 * LIMIT_S)
        process.kill()
        process.join()
    while not queue.empty():
        found |= queue.get()
    named = {f"{name}_{key}": value for key, value in found.items()} or {f"{name}_failed": True}
    print(json.dumps(named), flush=True)
    return named


def run_rank(rank: int, port: int, run: Experiment, env: Mapping[str, str], both: Any, queue: Any) -> None:
    """A forked rank. It exits without cleanup: torch's would wait for a broken group."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **env,
    }
    try:
        queue.put(run(both))
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def killed(both: Any) -> Facts:
    """Rank 1 is killed during an all-reduce: what the survivor holds, and when its stream continues."""
    import devices

    device = devices.join_group(LIMIT_S / 2)
    values = torch.ones(LARGE, device=device)
    times = []
    # The first collective connects the ranks.
    for _ in range(4):
        both.wait(LIMIT_S)
        began_s = time.monotonic()
        dist.all_reduce(values)
        devices.finish()
        times.append(time.monotonic() - began_s)
    values.fill_(devices.RANK + 1)
    devices.finish()
    whole_s = min(times)
    both.wait(LIMIT_S)
    work = dist.all_reduce(values, async_op=True)
    time.sleep(0.4 * whole_s)
    if devices.RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s, raised = time.monotonic(), ""
    is_over = work.is_completed
    if devices.CUDA:
        # For NCCL this makes the stream wait, not this thread.
        with suppress(Exception):
            work.wait()
        is_over = torch.cuda.current_stream().record_event().query
    while not is_over() and time.monotonic() < began_s + LIMIT_S:
        time.sleep(0.001)
    took_s = time.monotonic() - began_s
    group: Any = dist.group.WORLD
    status = group._get_backend(device).get_error().name if devices.CUDA else ""
    facts = {"all_reduce_s": round(whole_s, 3), "status": status}
    if not is_over():
        return {**facts, "stream_continued_s": None}
    try:
        work.wait()
    except Exception as error:
        raised = type(error).__name__
    shares = {name: round((values == value).float().mean().item(), 3) for name, value in (("summed", 3), ("own", 1))}
    return {**facts, "stream_continued_s": round(took_s, 3), "raised": raised, **shares}


def beside(both: Any) -> Facts:
    """Rank 1 comes late to an all-reduce: does the copy of rank 0's state run meanwhile, and how fast?"""
    import devices

    from elaunch.trainer.memory.device_copy import GpuCopies, HostCopies

    device = devices.join_group()
    state, gradients, target = torch.ones(LARGE, device=device), torch.ones(LARGE, device=device), torch.zeros(LARGE)
    copies = GpuCopies(device) if devices.CUDA else HostCopies()
    copies.copy([target], [state])
    dist.all_reduce(torch.ones(1, device=device))
    devices.finish()
    if devices.RANK == 1:
        both.wait(LIMIT_S)
        dist.all_reduce(gradients)
        devices.finish()
        return {}
    copies.after_commit()
    work = dist.all_reduce(gradients, async_op=True)
    began_s = time.monotonic()
    copies.copy([target], [state])
    took_s = time.monotonic() - began_s
    waits = not work.is_completed()
    both.wait(LIMIT_S)
    work.wait()
    devices.finish()
    return {"gb_per_s": round(state.nbytes / took_s / 1e9, 2), "still_waits": waits}


def context(both: Any) -> Facts:
    """The part of a restart that a forked worker does on its GPU: context, group, first all-reduce."""
    import devices

    both.wait(LIMIT_S)
    began_s = time.monotonic()
    dist.all_reduce(torch.ones(1, device=devices.join_group()))
    devices.finish()
    return {"to_all_reduce_s": round(time.monotonic() - began_s, 3)}


def ahead(both: Any) -> Facts:
    """The same of a worker that was forked ahead, and has its context already."""
    import devices

    devices.make_context()
    return context(both)


def memory_returns() -> Facts:
    """A process that holds memory of the GPU is killed: seconds until it is reaped, and until the memory is free."""
    there, counted, queue = FORKING.Event(), FORKING.Event(), FORKING.SimpleQueue()

    def hold() -> None:
        _ = torch.empty(HELD_BYTES, dtype=torch.uint8, device="cuda")
        there.set()
        signal.pause()

    def observe() -> None:
        before = torch.cuda.mem_get_info()[0]
        counted.set()
        while torch.cuda.mem_get_info()[0] < before + HELD_BYTES // 2:
            time.sleep(0.001)
        queue.put(time.monotonic())

    holder, observer = FORKING.Process(target=hold), FORKING.Process(target=observe)
    holder.start()
    there.wait(LIMIT_S)
    observer.start()
    counted.wait(LIMIT_S)
    began_s = time.monotonic()
    holder.kill()
    holder.join(LIMIT_S)
    found: Facts = {"memory_reaped_s": round(time.monotonic() - began_s, 3)}
    observer.join(LIMIT_S)
    observer.kill()
    if not queue.empty():
        found["memory_free_s"] = round(queue.get() - began_s, 3)
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
