"""agent.diagnosis.causes: which advice a failure gets, and which failures get none.

Each cause of docs/failures.md has a message, as programs write it, that it is the first to recognise.
"""

# ruff: noqa: E501
# Messages stand here as programs write them.

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from elaunch.agent.core.actions import Log
from elaunch.agent.core.events import WorkerExited
from elaunch.agent.diagnosis.causes.cause import NO_FACTS, Evidence, Facts, Space
from elaunch.agent.diagnosis.causes.table import RULES, _evidences, explained, needs_disks
from elaunch.agent.diagnosis.exit_status import Remains, failure_of, with_tail
from elaunch.rendezvous.types import Failure, FailureKind
from tests.unit.agent.driver import TWO, Driver, cleared, failure, settle

WORKER = Failure(FailureKind.EXIT_CODE, 0, "node-a-1", "node-a", 1, 1, 4711, None, "", failed_at=1.5)
SIGNALS = {-4: "SIGILL", -6: "SIGABRT", -7: "SIGBUS", -9: "SIGKILL", -11: "SIGSEGV", -15: "SIGTERM", -24: "SIGXCPU"}
FRAME = '  File "/home/u/train.py", line 3, in step\n    step()\n'
HEAD = "Traceback (most recent call last):\n"
FULL = Space("/dev/shm", 64 << 20, 0)
ROOMY = Space("/dev/shm", 64 << 30, 60 << 30)
OOM = "[Errno 28] No space left on device"
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 512.00 MiB is"
    " free. {other}Including non-PyTorch memory, this process has 78.60 GiB memory in use. Of the allocated memory"
    " 70.50 GiB is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated."
)
CUDA_MORE = "\nCUDA kernel errors might be asynchronously reported at some other API call.\n"


def raised(exception: str, message: str, frames: str = FRAME, before: str = "") -> Failure:
    """A failure by an uncaught exception, as a worker's own record has it."""
    stack = f"{before}{HEAD}{frames}{exception}: {message}\n"
    record = json.dumps({"message": {"message": f"{exception}: {message}", "extraInfo": {"py_callstack": stack}}})
    return failure_of(WORKER, Remains(1, record), "")


def exited(code: int, tail: str = "", kernel: str = "", crash: str = "", *, raised: bool = False) -> Failure:
    """A failure by an exit code or a signal, all output there."""
    remains = Remains(code, kernel=kernel, crash=crash, raised=raised)
    return with_tail(failure_of(WORKER, remains, SIGNALS.get(code, "")), tail)


def advice(failure: Failure, facts: Facts = NO_FACTS) -> str:
    return explained(failure, facts).advice


# The messages are those of CPython 3.11, torch 2.6 to 2.13, NCCL 2.21 and gloo.
EXCEPTIONS = [
    ("torch.OutOfMemoryError", CUDA_OOM.format(other="", idle="10.00 MiB"), "micro-batch"),
    ("torch.OutOfMemoryError", CUDA_OOM.format(other="", idle="6.00 GiB"), "expandable_segments"),
    ("torch.OutOfMemoryError", CUDA_OOM.format(other="Process 77 has 40.00 GiB memory in use. ", idle="1.00 MiB"), "pid 77"),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:115] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
     " to allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)", "more memory"),
    ("numpy.core._exceptions._ArrayMemoryError", "Unable to allocate 7.28 TiB for an array with shape (10,)", "more memory"),
    ("RuntimeError", f"CUDA error: device-side assert triggered{CUDA_MORE}", "index is out of range"),
    ("RuntimeError", f"CUDA error: an illegal memory access was encountered{CUDA_MORE}", "compute-sanitizer"),
    ("RuntimeError", f"CUDA error: invalid device ordinal{CUDA_MORE}", "by LOCAL_RANK"),
    ("RuntimeError", "CUDA error: no kernel image is available for execution on the device", "no code for this GPU"),
    ("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040).", "update the NVIDIA driver"),
    ("RuntimeError", "No CUDA GPUs are available", "sees no GPU"),
    ("RuntimeError", "Found no NVIDIA driver on your system. Please check", "sees no GPU"),
    ("AssertionError", "Torch not compiled with CUDA enabled", "built for CPUs only"),
    ("RuntimeError", "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing", "spawn"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "nearly full"),
    ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for"
     " details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed"
     " or device error.\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<4> failed", "NCCL_DEBUG=INFO names"),
    ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details),"
     " NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
     "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000", "set_device"),
    ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:94, internal error\nLast error:\nBootstrap : no socket"
     " interface found", "NCCL_SOCKET_IFNAME"),
    ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
     " operation to complete", "did not enter this collective"),
    ("elaunch.trainer.ranks.connections.PeerLost", "collective operation timeout: waited 1800 s for rank 1, channel"
     " elaunch/0/0/ranks/0", "did not enter this collective"),
    ("elaunch.trainer.ranks.connections.PeerLost", "rank 0 is gone or has failed: connection closed by peer (Connection"
     " timed out, at 10.0.0.1 port 4711, 2 times), channel elaunch/0/0/ranks/0", "open the ports between the nodes"),
    ("RuntimeError", "[enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find"
     " address for: eth9", "GLOO_SOCKET_IFNAME"),
    ("RuntimeError", "Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR:"
     " Connection refused, remote=[127.0.0.1]:31121$0", "open the ports between the nodes"),
    ("FileExistsError", "[Errno 17] File exists: 'runs/exp1'", "ELAUNCH_GENERATION"),
    ("torch.distributed.DistStoreError", "Timed out after 61 seconds waiting for clients. 2/4 clients joined.", "not all ranks called"),
    ("torch.distributed.DistStoreError", "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/2", "leave rank= and"),
    ("torch.distributed.DistNetworkError", "The server socket has failed to listen on any local network address. port:"
     " 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "ss -ltnp"),
    ("torch.distributed.DistNetworkError", "The client socket has timed out after 60000ms while trying to connect to (10.0.0"
     ".9, 29500).", "no store answers at that address. The workers meet at MASTER_ADDR:MASTER_PORT"),
    ("ValueError", "Default process group has not been initialized, please make sure to call init_process_group.", "before"),
    ("RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one.", "find_unused"),
    ("RuntimeError", "DataLoader worker (pid 17) is killed by signal: Killed. ", "most often the kernel"),
    ("RuntimeError", "DataLoader worker (pid 17) is killed by signal: Segmentation fault. ", "num_workers=0"),
    ("RuntimeError", "DataLoader worker (pid(s) 17, 18) exited unexpectedly", "num_workers=0"),
    ("OSError", f"{OOM}: '/data/model.pt'", "make room on the file system that the program writes to at /data/model.pt"),
    ("OSError", "[Errno 122] Disk quota exceeded", "quota"),
    ("OSError", "[Errno 24] Too many open files: '/data/1'", "ulimit -n"),
    ("RuntimeError", "unable to open shared memory object </torch_1_2_0> in read-write mode: Too many open files (24)", "ulimit -n"),
    ("RuntimeError", "received 0 items of ancdata", "file_system"),
    ("OSError", f"{OOM}: '/dev/shm/cache'", "make room on /dev/shm, which semaphores"),
    ("RuntimeError", "unable to write to file </torch_7_1_0>: No space left on device (28)", "/dev/shm"),
    ("OSError", "AF_UNIX path too long", "set TMPDIR"),
    ("RuntimeError", "can't start new thread", "ulimit -u"),
    ("OSError", "[Errno 98] Address already in use", "ss -ltnp"),
    ("OSError", "[Errno 99] Cannot assign requested address", "no interface of this node"),
    ("OSError", "[Errno 113] No route to host", "routes"),
    ("socket.gaierror", "[Errno -2] Name or service not known", "DNS"),
    ("ConnectionRefusedError", "[Errno 111] Connection refused", "no process listens"),
    ("OSError", "[Errno 30] Read-only file system: '/data/x'", "read-only"),
    ("PermissionError", "[Errno 13] Permission denied: '/data/x'", "open /data/x"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'data/x'", "relative"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/x'", "mounted"),
    ("OSError", "[Errno 116] Stale file handle: '/data/x'", "mount"),
    ("RuntimeError", "PytorchStreamReader failed finding central directory", "incomplete"),
    ("ModuleNotFoundError", "No module named 'sklearn'", "pip install scikit-learn)"),
    ("ModuleNotFoundError", "No module named 'google.protobuf'", "pip install protobuf)"),
    ("ModuleNotFoundError", "No module named '_lzma'", "this Python is built without it"),
    ("ImportError", "libcudart.so.12: cannot open shared object file: No such file or directory", "libcudart.so.12 is not"),
    ("ImportError", "/v/x.so: undefined symbol: _ZN3c105ErrorC2E", "install it again"),
    ("ImportError", "cannot import name 'b' from partially initialized module 'a' (most likely due to a circular import)"
     " (/home/u/a.py)", "import each other"),
    ("RuntimeError", "\n        An attempt has been made to start a new process before the\n        current process has"
     " finished its bootstrapping phase.", "__main__"),
    ("AttributeError", "Can't pickle local object 'main.<locals>.<lambda>'", "top level"),
]  # fmt: skip


MISMATCH = "the nodes have different software: torch 2.12 on node-b; torch 2.13 on node-a"
FAULTY = "Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
NO_SHM = Facts(shm=FULL)
ECC = Facts(gpu_errors=(FAULTY,))
OLD = Facts(mismatch=MISMATCH)
NCCL = "NCCL error in: x.cpp:94, "
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)"
# What `EXCEPTIONS` does not have: facts of the host, exit codes, signals, and the rarer messages.
EXAMPLES = {
    "killed by the kernel's out-of-memory killer": Evidence(-9, killed=FailureKind.OUT_OF_MEMORY),
    "killed by SIGKILL from an unknown sender": Evidence(-9, killed=FailureKind.SIGNAL),
    "killed by SIGKILL that the kernel did not send": Evidence(
        -9, killed=FailureKind.SIGNAL, facts=Facts(kills_are_counted=True)
    ),
    "MemoryError in Python": Evidence(1, "MemoryError"),
    "a DataLoader worker has too little shared memory": Evidence(
        1, "RuntimeError", "DataLoader worker (pid 9) is killed by signal: Bus error. ", facts=NO_SHM
    ),
    "a bus error from a small /dev/shm": Evidence(-7, facts=NO_SHM),
    "a GPU or its link is faulty (Xid)": Evidence(1, "RuntimeError", "CUDA error: unknown error", facts=ECC),
    "a failure between ranks, where the nodes have different versions of torch or Python": Evidence(
        1, "DistBackendError", f"{NCCL}invalid usage", facts=OLD
    ),
    "wrong arguments of the script": Evidence(2, text="train.py: error: unrecognized arguments: --lr0 0.1"),
    "a script that takes its local rank from an argument": Evidence(2, text="t.py: error: required: --local-rank"),
    "a variable that is not set": Evidence(
        1, "KeyError", "'DATA_DIR'", traceback='File "<frozen os>", line 679, in __getitem__'
    ),
    "a command that cannot be executed": Evidence(126, text="elaunch: ./run.sh cannot be started: Permission denied"),
    "a command that is not found": Evidence(127, text="run.sh: line 3: trian: command not found"),
    "a crash in native code, with its Python stack": Evidence(-11, crash="/home/u/model.py:17 in forward"),
    "an instruction that this CPU does not have": Evidence(-4),
    "a thread of native code that still ran at the program's end": Evidence(
        -6, text="terminate called without an active exception"
    ),
    "the heap is corrupted": Evidence(-6, text="double free or corruption (out)"),
    "NCCL watchdog: a collective timed out": Evidence(-6, text=WATCHDOG),
    "the nodes have different versions of NCCL": Evidence(
        1, "DistBackendError", f"{NCCL}internal error\nmismatched NCCL versions 2.21 and 2.27"
    ),
    "NCCL: invalid usage": Evidence(1, "DistBackendError", f"{NCCL}invalid argument\nncclInvalidArgument"),
    "the ranks disagree about the model (DDP)": Evidence(
        1, "RuntimeError", "DDP expects same model across all ranks, but Rank 0 has 2 params."
    ),
}


def _title(evidence: Evidence) -> str:
    return next((rule.title for rule in RULES if rule.cause(evidence)), "")


@pytest.mark.parametrize("title", EXAMPLES)
def test_its_own_rule_is_the_first_that_recognises_it(title: str) -> None:
    assert _title(EXAMPLES[title]) == title


def test_each_rule_has_an_example() -> None:
    recognised = {
        _title(evidence) for error, message, _ in EXCEPTIONS for evidence in _evidences(raised(error, message), Facts())
    }

    assert {rule.title for rule in RULES} - recognised == set(EXAMPLES)


@pytest.mark.parametrize(("exception", "message", "advised"), EXCEPTIONS, ids=lambda value: str(value)[:40])
def test_a_known_exception_has_its_next_step(exception: str, message: str, advised: str) -> None:
    found = advice(raised(exception, message))

    assert advised in found
    assert not re.search(r"\{\w+\}", found)
    assert not found.endswith(".")


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        *[("ValueError", "bad shard"), ("RecursionError", "maximum recursion depth exceeded"), ("AssertionError", "")],
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ("KeyError", "'weights'"),
        ("KeyError", "'LEARNING_RATE'"),
        ("AttributeError", "module 'torch' has no attribute 'frobnicate'"),
        ("AttributeError", "'NoneType' object has no attribute 'shape'"),
        ("RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:31937."),
        (
            "elaunch.trainer.ranks.connections.PeerLost",
            "rank 0 is gone or has failed: connection closed by peer, channel x",
        ),
        ("KeyboardInterrupt", ""),
        ("ImportError", "cannot import name 'no_such' from 'os' (/usr/lib/python3.11/os.py)"),
        ("TypeError", "step() missing 1 required positional argument: 'x'"),
    ],
)
def test_a_bug_of_the_users_own_has_none(exception: str, message: str) -> None:
    assert advice(raised(exception, message)) == ""


@pytest.mark.parametrize("code", [1, -9, -11, -15])
def test_the_output_does_not_explain_an_exit_that_it_is_far_from(code: int) -> None:
    tail = f"{OOM}\n" + "".join(f"step {number}\n" for number in range(10))

    assert "make room" in advice(exited(1, OOM))
    assert "make room" not in advice(exited(code, tail))


def test_the_direct_cause_of_an_exception_is_recognised_and_a_handled_one_is_not() -> None:
    first = f"{HEAD}{FRAME}OSError: [Errno 122] Disk quota exceeded\n\n"
    direct = first + "The above exception was the direct cause of the following exception:\n\n"
    handled = first + "During handling of the above exception, another exception occurred:\n\n"

    assert "quota" in advice(raised("RuntimeError", "saving failed", before=direct))
    assert advice(raised("RuntimeError", "the fallback failed", before=handled)) == ""


def test_no_room_for_a_semaphore_is_about_dev_shm_and_about_no_disk() -> None:
    frame = '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n    SemLock(\n'
    failed = explained(raised("OSError", OOM, FRAME + frame), Facts(full=(Space("/data", 1 << 40, 0),)))

    assert "make room on /dev/shm" in failed.advice
    assert "/data" not in failed.sentence


def test_a_tmpdir_that_is_too_long_is_named_where_a_thread_failed_and_another_waits_for_it() -> None:
    tail = f"{HEAD}{FRAME}OSError: AF_UNIX path too long\nstep 3\n"

    assert "set TMPDIR" in advice(replace(raised("RuntimeError", "DataLoader timed out after 20 seconds"), tail=tail))
    assert advice(replace(raised("ValueError", "nan"), tail=tail)) == ""


def test_a_module_that_is_in_a_folder_beside_the_script_has_the_line_for_pythonpath() -> None:
    failed = explained(raised("ModuleNotFoundError", "No module named 'datasets'"), Facts(folder="/home/my u"))

    assert "export PYTHONPATH='/home/my u':$PYTHONPATH" in failed.advice
    assert "pip" not in failed.advice


UNGUARDED = (
    "\n        An attempt has been made to start a new process before the\n        current process has finished its"
    " bootstrapping phase.\n\n        This probably means that you are not using fork to start your\n        child"
    " processes and you have forgotten to use the proper idiom\n        in the main module:\n"
)
ENDED = "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 1"


RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


@pytest.mark.parametrize("later", ["", *(f"{HEAD}{FRAME}{end}\n" for end in (ENDED, RESET))])
def test_without_a_main_guard_the_report_has_the_place_and_the_next_step_and_no_page_of_text(later: str) -> None:
    library = "".join(f'  File "/usr/lib/python3.11/multiprocessing/m{n}.py", line {n}, in f\n' for n in range(12))
    tail = f"{HEAD}{FRAME}{library}RuntimeError: {UNGUARDED}{later}"

    failed = explained(with_tail(failure_of(WORKER, Remains(1), ""), tail))

    assert "__main__" in failed.advice
    assert (failed.traceback, failed.tail) == ("/home/u/train.py:3 in step", "")
    assert failed.is_cut, "the report names the place of all of it"


def test_a_wrong_command_line_has_the_message_of_argparse() -> None:
    failed = explained(exited(2, "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lr0 0.1\n"))

    assert failed.message == (
        "exited with code 2 (the exit code of a wrong command line; unrecognized arguments: --lr0 0.1)"
    )
    assert failed.advice == "correct the arguments after the script; train.py --help lists them"


def test_an_abort_by_an_exception_of_cpp_has_the_next_step_of_its_text() -> None:
    what = "  what():  CUDA error: device-side assert triggered\nException raised from c10_cuda at x.cpp:43\n"

    assert "index is out of range" in advice(exited(-6, f"terminate called after throwing 'c10::Error'\n{what}"))


def test_nccls_watchdog_names_the_collective_and_its_number() -> None:
    tail = (
        "[rank1]:[E1127 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
        " OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] Process group"
        " watchdog thread terminated with exception\n"
    )

    failed = explained(exited(-6, tail))

    assert "ALLREDUCE, number 5 on its process group, was not done after 600 s" in failed.message
    assert "did not enter this collective" in failed.advice


@pytest.mark.parametrize(("space", "is_named"), [(FULL, True), (ROOMY, False)])
def test_a_bus_error_is_put_down_to_shared_memory_only_where_that_is_small_or_full(
    space: Space, is_named: bool
) -> None:
    bus, loader = exited(-7), raised("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Bus error. ")
    facts = Facts(shm=space)

    assert needs_disks(bus)
    assert needs_disks(loader)
    assert ("--shm-size" in advice(bus, facts)) is is_named
    assert ("--shm-size" in advice(loader, facts)) is is_named
    assert ("/dev/shm has 64 MiB in all, 0 B free" in explained(bus, facts).message) is is_named
    assert advice(bus) == ""


def test_a_kill_for_memory_names_the_limit() -> None:
    killed = exited(-9, kernel="out of memory, per the kernel log")

    assert not needs_disks(killed)
    assert advice(killed, Facts(memory_limit="16 GiB")).startswith("give the job more memory (its limit is 16 GiB), or")


def test_a_kill_of_an_unknown_sender_names_those_that_are_possible() -> None:
    killed = exited(-9)

    assert advice(killed).startswith("find the sender: the kernel for lack of memory (dmesg -T")
    assert advice(killed, Facts(kills_are_counted=True)).startswith(
        "the kernel's out-of-memory killer did not send it; find another sender: the scheduler"
    )


def test_a_kill_by_the_agent_itself_has_no_unknown_sender() -> None:
    killed = exited(-9, raised=True)

    assert killed.message == "raised an exception, did not exit, and was killed by SIGKILL"
    assert advice(killed, Facts(kills_are_counted=True)) == ""


def test_each_file_system_that_is_full_is_named_with_its_numbers() -> None:
    full = raised("OSError", OOM)
    spaces = [Space(mount, 1 << 40, 0) for mount in ("/", "/data", "/scratch", "/more")]
    no_files = Facts(full=(Space("/data", 2 << 40, 1 << 40, files_free=0),))

    assert needs_disks(full)
    assert explained(full, Facts(full=tuple(spaces[:2]))).message.endswith(
        "(/ has 0 B free of 1 TiB, or /data has 0 B free of 1 TiB)"
    )
    assert advice(full, Facts(full=tuple(spaces[:2]))) == ("make room on / or /data, or write somewhere else")
    assert explained(full, Facts(full=tuple(spaces))).message.endswith(
        "/scratch has 0 B free of 1 TiB, or another one)"
    )
    assert "no more files can be created on /data" in explained(full, no_files).message


@pytest.mark.parametrize(
    ("line", "is_hardware"), [(FAULTY, True), ("Xid (PCI:0000:3b:00): 31, pid=1234, MMU Fault", False)]
)
def test_an_error_of_the_driver_explains_a_cuda_error_where_it_is_the_hardwares(line: str, is_hardware: bool) -> None:
    failed = raised("RuntimeError", "CUDA error: an illegal memory access was encountered")
    facts = Facts(gpu_errors=(line,))

    assert ("take this node out" in advice(failed, facts)) is is_hardware
    assert ("the NVIDIA driver logged" in explained(failed, facts).message) is is_hardware


SEGV = """Fatal Python error: Segmentation fault

Thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f2b (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1518 in _call_impl
  File "/home/u/model.py", line 17 in forward
  File "/home/u/train.py", line 40 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""


def test_a_crash_shows_the_innermost_line_of_the_users_code() -> None:
    recorded, printed = exited(-11, crash=SEGV), exited(-11, f"step 1\n{SEGV}")

    for failed in (recorded, printed):
        assert failed.message == "was killed by SIGSEGV (crashed in /home/u/model.py:17 in forward)"
        assert failed.frame == "/home/u/model.py:17 in forward"
        assert failed.traceback.startswith("Fatal Python error: Segmentation fault")
        assert "Extension modules" not in failed.traceback
        assert "update or rebuild" in advice(failed)


def test_a_cpp_exception_is_in_the_headline() -> None:
    tail = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  bad tile\n"

    assert exited(-6, tail).message == "was killed by SIGABRT (std::runtime_error: bad tile)"


def running(second: str) -> tuple[Driver, Driver]:
    """Two nodes, of which the second has that software."""
    one = Driver(TWO, slots=1, software="torch 2.13").begin()
    one.settle()
    other = Driver(TWO, store=one.store, host="node-b", slots=1, remote=True, software=second).begin()
    settle(one, other)
    return one, other


def test_both_nodes_warn_once_of_other_software_also_after_a_restart() -> None:
    one, other = running("torch 2.12")
    for driver, code in ((one, 3), (other, -15)):
        driver.exits(0, code)
        driver.happen(cleared(0))
        settle(one, other)

    for driver in (one, other):
        assert driver.snapshot.generation.number == 1
        warnings = [log for log in driver.all_acted if isinstance(log, Log) and "software" in log.text]
        assert warnings == [Log(MISMATCH, "warning")]


@pytest.mark.parametrize(
    ("second", "exception", "message", "is_named"),
    [
        ("torch 2.12", "DistBackendError", f"{NCCL}invalid usage", True),
        ("torch 2.12", "ValueError", "the loss is NaN", False),
        ("torch 2.13", "DistBackendError", f"{NCCL}invalid usage", False),
    ],
)
def test_other_software_is_the_next_step_of_a_failure_between_ranks_and_of_no_other(
    second: str, exception: str, message: str, is_named: bool
) -> None:
    one, _ = running(second)
    failed = replace(
        failure(0, 0, 1, FailureKind.EXCEPTION), message=f"raised {exception}: {message}", exception=exception
    )

    one.happen(WorkerExited(0, 0, 1, failed))
    one.happen(cleared(0))

    assert one.agent.last_failure
    assert one.agent.last_failure.advice.startswith(MISMATCH) is is_named
