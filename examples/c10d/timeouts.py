"""A rank that is late: what its peers see, who names it, and how the ranks go on without a restart.

    elaunch --nproc-per-node 2 examples/c10d/timeouts.py

With gloo a collective that waits too long raises in the rank that waits, and its group cannot be used any more; the
ranks make a new group and go on. With NCCL the error is asynchronous: a watchdog thread notices it and, by default
(TORCH_NCCL_ASYNC_ERROR_HANDLING=3), ends the process, so there elaunch starts the job again. So this script uses gloo
also where there are GPUs. elaunch's own `--hang-timeout` names the late rank before any timeout.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

SHORT = timedelta(seconds=2)

dist.init_process_group("gloo")
RANK, N = dist.get_rank(), dist.get_world_size()
LATE = N - 1
# The late rank waits for this store and not for a time: the skew is as long as the others' timeouts take.
store = dist.PrefixStore("timeouts", dist.distributed_c10d._get_default_store())
impatient = dist.new_group(timeout=SHORT, backend="gloo")
control = dist.new_group(backend="gloo")


def late_rank_waits_for(word: str) -> None:
    """The late rank comes when all others have said `word`."""
    if RANK == LATE:
        store.wait([word], timedelta(seconds=60))
    elif store.add(f"{word} said", 1) == N - 1:
        store.set(word, "")


def a_collective_times_out() -> None:
    if RANK != LATE:
        begun_s = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=impatient)
        except RuntimeError as error:
            waited_s = time.monotonic() - begun_s
            assert waited_s > 1.9, waited_s
            if RANK == 0:
                print(f"all_reduce: after {waited_s:.1f} s {str(error).rpartition('] ')[2][:70]}…", flush=True)
        else:
            raise AssertionError("a collective without the late rank has ended")
    late_rank_waits_for("timed out")


def an_asynchronous_one_times_out_when_it_is_waited_for() -> None:
    group = dist.new_group(timeout=SHORT, backend="gloo")
    if RANK != LATE:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert not work.is_completed()
        try:
            work.wait()
        except RuntimeError:
            if RANK == 0:
                print(f"async_op: the error comes with wait(); is_completed() is {work.is_completed()}", flush=True)
        else:
            raise AssertionError("a collective without the late rank has ended")
    late_rank_waits_for("waited")


def a_monitored_barrier_names_the_late_rank() -> None:
    if RANK != LATE:
        told = ""
        try:
            dist.monitored_barrier(control, timeout=SHORT, wait_all_ranks=True)
        except RuntimeError as error:
            told = str(error).splitlines()[0]
        # Rank 0 knows who is missing. The others only hear nothing from rank 0.
        assert f" {LATE} failed" in told if RANK == 0 else told, told
        if RANK == 0:
            print(f"monitored_barrier: {told[:80]}…", flush=True)
    late_rank_waits_for("barred")


def a_new_group_goes_on() -> None:
    group = dist.new_group(backend="gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert int(tensor) == N
    if RANK == 0:
        print(f"a new group of all {N} ranks works", flush=True)


if N == 1:
    print("one rank waits for nobody: start at least two")
else:
    a_collective_times_out()
    an_asynchronous_one_times_out_when_it_is_waited_for()
    a_monitored_barrier_names_the_late_rank()
    a_new_group_goes_on()
dist.destroy_process_group()
