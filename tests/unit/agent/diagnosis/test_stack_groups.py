"""agent.diagnosis.stack_groups and waits: equal stacks in one group, as text, and what they wait for."""

from __future__ import annotations

import pytest

from elaunch.agent.diagnosis.stack_groups import (
    Frame,
    Stack,
    ThreadStack,
    full_text,
    group_text,
    grouped,
    location_text,
    ranks_text,
)
from elaunch.agent.diagnosis.waits import Doing, doing, doing_text, helpers_work

LIB = "/opt/venv/lib/python3.11"
TORCH = f"{LIB}/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
WRAPPER = Frame("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83)
STEP = Frame("train_step", "/home/me/train.py", 41)
TOP = Frame("<module>", "/home/me/train.py", 90)
ALL_REDUCE = (Frame("all_reduce", C10D, 2810), WRAPPER, STEP, TOP)
BACKWARD = (
    Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 979),
    Frame("backward", f"{TORCH}/autograd/__init__.py", 395),
    Frame("Tensor.backward", f"{TORCH}/_tensor.py", 623),
    STEP,
    TOP,
)

GPU_WAIT = (
    Frame("GpuCopies.before_commit", f"{LIB}/site-packages/elaunch/trainer/memory/device_copy.py", 81),
    Frame("Keeper.commit", f"{LIB}/site-packages/elaunch/trainer/keeper/keeper.py", 300),
    STEP,
    TOP,
)


def main_thread(*frames: Frame, call: str = "futex", target: str = "", active: bool = False) -> ThreadStack:
    call = "" if active else call
    return ThreadStack("MainThread", frames, is_main=True, is_active=active, syscall=call, target=target)


def stack(rank: int, *frames: Frame, **how: object) -> Stack:
    return Stack(rank, 4000 + rank, (main_thread(*frames, **how),), "S")  # type: ignore[arg-type]


def test_ranks_with_equal_stacks_are_one_group_and_the_largest_comes_first() -> None:
    loop = (Frame("spin", "/home/me/train.py", 12), TOP)
    stacks = [stack(1, *loop, active=True), *(stack(rank, *ALL_REDUCE) for rank in (3, 0, 2))]

    groups = grouped(stacks)

    assert [group.ranks for group in groups] == [(0, 2, 3), (1,)]
    assert group_text(groups[0]) == (
        "ranks 0, 2, 3: all_reduce (torch/distributed/distributed_c10d.py:2810) ← train_step (train.py:41)"
    )
    assert group_text(groups[1]) == "rank 1: spin (train.py:12)"


def test_a_stopped_process_is_a_group_of_its_own() -> None:
    stopped = Stack(1, 7, stack(1, *ALL_REDUCE).threads, state="T")

    groups = grouped([stack(0, *ALL_REDUCE), stopped])

    assert [group.ranks for group in groups] == [(0,), (1,)]
    assert group_text(groups[1]).startswith("rank 1: stopped by a signal, in all_reduce (")
    troubled = [location_text(Stack(1, 7, (), state, "py-spy is not installed")) for state in "TtS"]
    assert troubled == [
        f"{held}py-spy is not installed" for held in ("stopped by a signal: ", "stopped by a debugger: ", "")
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "rank 3"),
        ((0, 1), "ranks 0, 1"),
        ((0, 2, 3, 4, 7), "ranks 0, 2–4, 7"),
        (tuple(range(1024)), "ranks 0–1023"),
        (tuple(range(0, 100, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, …"),
    ],
)
def test_ranks_in_a_row_are_a_range(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


def test_the_full_text_has_each_thread_and_child_with_the_main_thread_first() -> None:
    feeder = ThreadStack("feeder", (Frame("Condition.wait", f"{LIB}/threading.py", 327),), syscall="futex")
    child = Stack(0, 99, (main_thread(Frame("load", "/home/me/data.py", 5), call="read", target="/mnt/x"),), "D")
    whole = Stack(0, 98, (feeder, *stack(0, *ALL_REDUCE).threads), "S", children=(child,))

    text = full_text([whole, Stack(1, 5, trouble="the process is gone")])

    assert text == (
        "=== rank 0 (pid 98)\n"
        "thread MainThread: waits in futex\n"
        f'  File "{C10D}", line 2810, in all_reduce\n'
        f'  File "{WRAPPER.file}", line 83, in {WRAPPER.function}\n'
        '  File "/home/me/train.py", line 41, in train_step\n'
        '  File "/home/me/train.py", line 90, in <module>\n'
        "thread feeder: waits in futex\n"
        f'  File "{LIB}/threading.py", line 327, in Condition.wait\n'
        "child process, pid 99\n"
        "    thread MainThread: waits in read of /mnt/x\n"
        '      File "/home/me/data.py", line 5, in load\n'
        "=== rank 1 (pid 5)\n"
        "the process is gone\n"
    )


# Innermost first.
KEPT = [
    ("_poll", "connections.py"),
    ("receive", "connections.py"),
    ("_reduce", "peers.py"),
    ("all_reduce_max", "peers.py"),
]


def library(function: str, path: str) -> Frame:
    return Frame(function, f"{LIB}/{path}", 7)


CONDITION = library("Condition.wait", "threading.py")


@pytest.mark.parametrize(
    ("taken", "what", "text"),
    [
        (stack(0, *ALL_REDUCE), Doing.COLLECTIVE, "waits in all_reduce"),
        (stack(0, *ALL_REDUCE, active=True), Doing.COLLECTIVE, "waits in all_reduce"),
        (stack(0, *ALL_REDUCE, call=""), Doing.COLLECTIVE, "waits in all_reduce"),
        (stack(0, *BACKWARD), Doing.COLLECTIVE, "waits in the all-reduce of a backward pass"),
        (stack(0, *BACKWARD, active=True), Doing.RUNS, "runs"),
        (
            stack(0, Frame("_store_based_barrier", C10D, 5), Frame("init_process_group", C10D, 9), STEP, call="poll"),
            Doing.RENDEZVOUS,
            "waits for the other ranks to make the process group",
        ),
        (stack(0, library("rendezvous", "site-packages/torch/distributed/rendezvous.py"), STEP), Doing.RENDEZVOUS, ""),
        # Asleep between two tries to reach MASTER_PORT.
        (stack(0, library("rendezvous", f"{LIB}/torch/distributed/rendezvous.py"), STEP, call="clock_nanosleep"),
         Doing.RENDEZVOUS, ""),
        # The Keeper's ranks wait for each other, installed or in a checkout.
        *(
            (
                stack(0, *(Frame(*each, 5) for each in kept), STEP, call="poll"),
                Doing.COLLECTIVE,
                "waits in all_reduce_max",
            )
            for kept in (
                [(name, f"{place}/elaunch/trainer/ranks/{file}") for name, file in KEPT]
                for place in (f"{LIB}/site-packages", "/home/me/elaunch/src")
            )
        ),
        # A shard that is written is no collective, wherever torch's code for that is.
        (
            stack(0, Frame("save", f"{TORCH}/distributed/checkpoint/filesystem.py", 1), STEP, call="fsync",
                  target="/mnt/shard"),
            Doing.FILE,
            "waits for /mnt/shard",
        ),
        (
            stack(0, library("select", "selectors.py"), library("get", "multiprocessing/queues.py"),
                  library("__next__", "site-packages/torch/utils/data/dataloader.py"), STEP, call="poll"),
            Doing.LOADER,
            "waits for its data loader",
        ),
        (stack(0, STEP, TOP), Doing.LOCK, "waits for a lock or for another thread"),
        (stack(0, library("join", "threading.py"), STEP), Doing.LOCK, ""),
        # By the call, whatever the frames are.
        (stack(0, CONDITION, STEP), Doing.LOCK, "waits for a lock or for another thread"),
        (stack(0, CONDITION, STEP, call="read", target="/mnt/x"), Doing.FILE, "waits for /mnt/x"),
        (stack(0, CONDITION, STEP, call="wait4"), Doing.CHILD, ""),
        (stack(0, CONDITION, STEP, call="clock_nanosleep"), Doing.SLEEP, "sleeps"),
        (stack(0, STEP, call="clock_nanosleep"), Doing.SLEEP, "sleeps"),
        (stack(0, library("wait", "site-packages/torch/utils/file_baton.py"), STEP, call="clock_nanosleep"),
         Doing.SLEEP,
         "waits for the lock of a torch extension's build"),
        (stack(0, *GPU_WAIT, call="clock_nanosleep"), Doing.GPU, "waits for the GPU"),
        (stack(0, *GPU_WAIT, active=True), Doing.GPU, "waits for the GPU"),
        (stack(0, STEP, call="wait4"), Doing.CHILD, ""),
        (stack(0, library("_wait", "subprocess.py"), STEP, call=""), Doing.CHILD, ""),
        (stack(0, STEP, call="read", target="/mnt/data/shard-3"), Doing.FILE, "waits for /mnt/data/shard-3"),
        (stack(0, STEP, call="recvfrom", target="socket:[1]"), Doing.NETWORK, ""),
        (stack(0, library("recv_into", "ssl.py"), STEP, call=""), Doing.NETWORK, ""),
        (stack(0, STEP, call="read", target="/dev/pts/3"), Doing.PROMPT, "waits for a person at a prompt"),
        (stack(0, library("cmdloop", "cmd.py"), library("interaction", "pdb.py"), STEP, call=""), Doing.PROMPT, ""),
        (stack(0, STEP, call="read", target="pipe:[7]"), Doing.OTHER, "waits"),
        (stack(0, STEP, active=True), Doing.RUNS, "runs"),
        (Stack(0, 1, stack(0, STEP).threads, "T"), Doing.STOPPED, ""),
        (Stack(0, 1, stack(0, STEP).threads, "t"), Doing.TRACED, ""),
        (Stack(0, 1, trouble="the process is gone"), Doing.UNKNOWN, "shows no stack"),
    ],
)  # fmt: skip
def test_what_a_rank_waits_for_is_in_its_frames_and_its_system_call(taken: Stack, what: Doing, text: str) -> None:
    assert doing(taken) is what
    assert doing_text(taken) == (text or what.value)
    assert doing(taken).is_for_ranks == (what in (Doing.COLLECTIVE, Doing.RENDEZVOUS))


def test_a_thread_or_a_child_that_reads_or_runs_may_be_on_the_way() -> None:
    idle = ThreadStack("feeder", (CONDITION,), syscall="futex")
    reader = ThreadStack("reader", (Frame("load", "/home/me/data.py", 5),), syscall="read", target="/mnt/x")
    mine = stack(0, STEP).threads

    assert not helpers_work(Stack(0, 1, (*mine, idle)))
    assert not helpers_work(Stack(0, 1, (*mine, idle), children=(Stack(0, 2, (idle,)),)))
    assert helpers_work(Stack(0, 1, (*mine, reader)))
    assert helpers_work(Stack(0, 1, mine, children=(Stack(0, 2, (reader,)),)))


def test_another_line_of_the_users_code_is_another_group() -> None:
    elsewhere = (*ALL_REDUCE[:2], Frame("train_step", "/home/me/train.py", 44), TOP)

    assert [group.ranks for group in grouped([stack(0, *ALL_REDUCE), stack(1, *elsewhere)])] == [(0,), (1,)]
