"""agent.diagnosis.exit_status: makes a failure of what a worker leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from elaunch.agent.diagnosis.causes.table import explained
from elaunch.agent.diagnosis.exit_status import (
    Raised,
    Remains,
    failure_of,
    is_peer_lost,
    parse_record,
    parse_traceback,
    with_tail,
)
from elaunch.rendezvous.codec import encode
from elaunch.rendezvous.rules.restart_policy import identical
from elaunch.rendezvous.types import Failure, FailureKind
from tests.harness import RUN_LIMIT_S

WORKER = Failure(FailureKind.EXIT_CODE, 2, "node-a-1", "node-a", 5, 1, 4711, None, "", failed_at=1.5)


def failure(
    code: int, record: str = "", tail: str = "", *, progressed: bool | None = None, kernel: str = ""
) -> Failure:
    remains = Remains(code, error_record=record, tail=tail, kernel=kernel, progressed=progressed)
    return failure_of(replace(WORKER, progressed=progressed), remains, "SIGKILL" if code == -9 else f"signal {-code}")


def record_of(exception: str, message: str, stack: str = "") -> str:
    info = {"py_callstack": stack, "timestamp": "10"}
    return json.dumps({"message": {"message": f"{exception}: {message}", "extraInfo": info}})


def stderr_of(folder: Path, source: str) -> str:
    """What Python itself prints when `source` dies."""
    script = folder / "train.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, "-S", "-u", script], stderr=subprocess.PIPE, text=True, check=False, timeout=RUN_LIMIT_S
    ).stderr


def test_a_worker_killed_by_a_signal_is_named_by_it_and_by_lack_of_memory_if_the_kernel_logged_that() -> None:
    killed, for_memory = failure(-9), failure(-9, kernel="out of memory, per the kernel log")

    assert (killed.kind, killed.message) == (FailureKind.SIGNAL, "was killed by SIGKILL")
    assert killed.sentence == "rank 5 (local rank 1 on node-a, pid 4711) was killed by SIGKILL in generation 2"
    assert (killed.code, killed.node_id, killed.failed_at) == (-9, "node-a-1", 1.5)
    assert for_memory.kind is FailureKind.OUT_OF_MEMORY
    assert for_memory.message == "was killed by SIGKILL (out of memory, per the kernel log)"


def test_a_program_that_refuses_is_named_by_its_reason_unless_a_signal_ended_it() -> None:
    remains = Remains(2, tail="text", progressed=True, refused="6 layers cannot be divided by 4\nmore")
    refused = failure_of(WORKER, remains, "")
    killed = failure_of(WORKER, replace(remains, code=-9), "SIGKILL")

    assert (refused.kind, refused.code) == (FailureKind.REFUSED, 2)
    assert with_tail(refused, "text").message == "refused to run: 6 layers cannot be divided by 4 …"
    # The job's last line has the reason.
    assert refused.headline == "rank 5 (local rank 1 on node-a, pid 4711) refused to run in generation 2"
    assert killed.headline == killed.sentence
    assert killed.kind is FailureKind.SIGNAL


@pytest.mark.parametrize(("code", "shown"), [(-15, 1), (-9, 1), (-6, 1), (-11, -11), (1, 1)])
def test_an_exception_whose_process_the_agent_ended_on_its_way_out_has_pythons_exit_code(code: int, shown: int) -> None:
    """A peer that lost it may end first. Then the agent stops all workers, also this one."""
    record = record_of("ValueError", "bad batch")

    ended = failure_of(WORKER, Remains(code, error_record=record, raised=True), f"signal {-code}")

    assert (ended.kind, ended.exception, ended.code) == (FailureKind.EXCEPTION, "ValueError", shown)
    assert identical(ended, replace(ended, generation=3)), "the second time ends the job"


def test_a_crash_on_the_way_out_does_not_hide_the_exception() -> None:
    tail = "terminate called without an active exception\n"
    aborts = partial(Remains, -6, tail=tail)

    raised = failure_of(WORKER, aborts(error_record=record_of("ValueError", "nan"), raised=True), "SIGABRT")
    returned = failure_of(WORKER, aborts(returned=True), "SIGABRT")
    exited = failure_of(WORKER, aborts(returned=True, own_code=7), "SIGABRT")

    assert (raised.kind, raised.code) == (FailureKind.EXCEPTION, 1)
    assert raised.message == "raised ValueError: nan, and was then killed by SIGABRT"
    assert returned.message == "was killed by SIGABRT after its program had ended"
    assert exited.message == "was killed by SIGABRT after its program had ended with exit code 7"
    assert "destroy_process_group()" in explained(with_tail(returned, tail)).advice


def test_a_program_that_exits_after_the_error_of_a_lost_peer_has_lost_one_though_it_printed_nothing() -> None:
    lost = Raised("RuntimeError", "[a/pair.cc:553] Connection closed by peer [::1]:7. More", "", "", call="all_reduce")
    record = record_of("TrainingFailed", "see the log")

    caught = with_tail(failure_of(WORKER, Remains(1, lost=lost), ""), "bye\n")
    raised = failure_of(WORKER, Remains(1, error_record=record, lost=lost, raised=True), "")

    for failed, then in ((caught, "exited with code 1"), (raised, "raised TrainingFailed: see the log")):
        assert (failed.kind, failed.call) == (FailureKind.PEER_LOST, "all_reduce")
        assert (
            failed.message == f"lost a peer in all_reduce (RuntimeError: Connection closed by peer [::1]:7) and {then}"
        )


@pytest.mark.parametrize(("code", "text"), [(2, "wrong command line"), (126, "cannot be executed"), (127, "not found")])
def test_the_codes_of_a_bad_start_are_start_up_failures_until_there_was_progress(code: int, text: str) -> None:
    early, late = failure(code), failure(code, progressed=True)

    assert early.kind is FailureKind.STARTUP
    assert text in early.message
    assert late.kind is FailureKind.EXIT_CODE


@pytest.mark.parametrize("name", ["ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"])
def test_a_bad_import_is_a_start_up_failure_until_there_was_progress(name: str) -> None:
    record = record_of(name, "No module named 'nowhere'")

    assert failure(1, record).kind is FailureKind.STARTUP
    assert failure(1, record, progressed=True).kind is FailureKind.EXCEPTION


@pytest.mark.parametrize("progressed", [None, False, True])
def test_a_debugger_that_was_left_is_named_so_and_no_common_exception(progressed: bool | None, tmp_path: Path) -> None:
    tail = stderr_of(tmp_path, "import bdb\nraise bdb.BdbQuit\n")

    left = failure(1, tail=tail, progressed=progressed)
    recorded = failure(1, record_of("BdbQuit", "", tail), progressed=progressed)

    assert left.kind is recorded.kind is FailureKind.DEBUGGER
    assert left.message == recorded.message == "left its debugger (BdbQuit)"
    assert left.traceback.endswith("BdbQuit")


def test_an_uncaught_exception_has_type_text_place_and_traceback(tmp_path: Path) -> None:
    tail = "epoch 1\n" + stderr_of(tmp_path, "def f(n):\n    return [][n]\nf(7)\n")

    raised = failure(1, tail=tail)

    assert raised.kind is FailureKind.EXCEPTION
    assert raised.message == "raised IndexError: list index out of range"
    assert raised.exception == "IndexError"
    assert raised.frame == f"{tmp_path}/train.py:2 in f"
    assert raised.traceback.startswith("Traceback (most recent call last):\n")
    assert raised.traceback.endswith("IndexError: list index out of range")
    assert raised.tail == tail


@pytest.mark.parametrize(
    ("source", "exception", "line"),
    [("x = (\n1 +\n", "SyntaxError", 1), ("if 1:\n    x = 1\n  y = 2\n", "IndentationError", 3)],
)
def test_an_error_in_the_programs_own_text_is_a_start_up_failure_with_its_place(
    tmp_path: Path, source: str, exception: str, line: int
) -> None:
    failed = failure(1, tail=stderr_of(tmp_path, source))

    assert failed.kind is FailureKind.STARTUP
    assert failed.exception == exception
    assert failed.frame == f"{tmp_path}/train.py:{line}"
    assert failed.traceback.splitlines()[0] == f'  File "{tmp_path}/train.py", line {line}'


def test_the_place_of_an_error_is_the_innermost_frame_of_the_users_own_code() -> None:
    tail = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 9, in <module>\n    main()\n'
        '  File "/home/u/model.py", line 31, in forward\n    return self.fc(x)\n'
        '  File "/venv/lib/python3.11/site-packages/torch/nn/linear.py", line 125, in forward\n    return F.linear()\n'
        '  File "<frozen importlib._bootstrap>", line 1, in _find\n'
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)\n"
    )

    raised = parse_traceback(tail)

    assert raised is not None
    assert raised.frame == "/home/u/model.py:31 in forward"


def test_the_prefix_of_torch_distributed_does_not_hide_the_traceback() -> None:
    # Exactly what torch 2.13 prints once a process group exists.
    tail = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/u/train.py", line 19, in <module>\n'
        "[rank1]:     step()\n"
        "[rank1]:     ^^^^^^\n"
        "[rank1]: ValueError: bad batch\n"
    )

    raised = failure(1, tail=tail)

    assert raised.kind is FailureKind.EXCEPTION
    assert raised.message == "raised ValueError: bad batch"
    assert raised.frame == "/home/u/train.py:19 in <module>"


@pytest.mark.parametrize(
    "tail",
    [
        "",
        "no error here\n",
        "Traceback (most recent call last):\n",
        'Traceback (most recent call last):\n  File "a.py"',
    ],
)
def test_what_holds_no_whole_traceback_gives_none(tail: str) -> None:
    assert parse_traceback(tail) is None


def test_torchs_error_file_wins_over_what_was_printed() -> None:
    tail = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\nKeyError: 1\n'
    stack = 'Traceback (most recent call last):\n  File "/b.py", line 2, in g\nValueError: from the file\n'

    raised = failure(1, record_of("ValueError", "from the file", stack), tail)

    assert (raised.message, raised.frame) == ("raised ValueError: from the file", "/b.py:2 in g")


def test_the_short_form_of_an_error_file_is_its_message() -> None:
    short = failure(1, '{"message": "the loss is NaN", "timestamp": 10}')

    assert (short.kind, short.exception) == (FailureKind.EXCEPTION, "")
    assert short.message == "raised an error: the loss is NaN"


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "3", '"text"', "{}", '{"message": null}', '{"message": 3}', '{"message": {}}'),
        *('{"message": []}', '{"message": {"message": "a", "extraInfo": null}}', "[" * 60_000, '{"message":' * 60_000),
        *(record_of("ValueError", "bad", "Traceback…")[:end] for end in (1, 30, -1)),
    ],
)
def test_a_torn_or_other_error_file_is_as_good_as_none(text: str) -> None:
    assert parse_record(text) is None


NCCL_SYSTEM = "NCCL error in: x.cpp:1333, unhandled system error\nncclSystemError: System call failed\nLast error:\n"
NCCL_INTERNAL = "NCCL error in: x.cpp:1275, internal error\nncclInternalError: Internal check failed.\nLast error:\n"
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    "message",
    [
        # gloo: the peer's socket ended, was reset, or went silent; a peer that died while the mesh was made.
        f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:31937. This is typically caused by a remote worker",
        f"{GLOO}pair.cc:534] Read error [127.0.0.1]:4000: Connection reset by peer",
        f"{GLOO}pair.cc:169] Write error [127.0.0.1]:4000: Broken pipe",
        f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
        # Its others (gloo/transport/tcp: pair.cc, buffer.cc, unbound_buffer.cc, error.cc, socket.cc, tls/pair.cc).
        f"{GLOO}pair.cc:534] Read error [10.0.0.2]:4000: No route to host",
        f"{GLOO}pair.cc:200] Socket unexpectedly closed [10.0.0.2]:4000",
        f"{GLOO}pair.cc:520] Read timeout [10.0.0.2]:4000",
        f"{GLOO}tls/pair.cc:183] SSL_read 10 failed: ssl error: 5, errno = Success, ssl error message: eof",
        f"[enforce fail at {GLOO[1:]}pair.cc:787] state_ == CONNECTED. 4 vs 3. Pair is not connected ([::1]:1",
        f"[enforce fail at {GLOO[1:]}socket.cc:142] rv != -1. -1 vs -1. connect: Network is unreachable",
        "Application timeout caused pair closure",
        "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms",
        f"Gloo connectFullMesh failed with {GLOO}pair.cc:144] no error",
        "Gloo connectFullMesh failed with [..]: timed out connecting: SO_ERROR: No route to host, remote=[10.0.0.2]",
        # TCPStore.
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "The client socket has failed to connect to any network address of (head, 29500).",
        "Timed out after 4 seconds waiting for clients. 1/2 clients joined.",
        "Socket Timeout",
        "recvValue failed on SocketImpl(fd=3, addr=[a]:1, remote=[b]:2): Connection timed out",
        # RPC's TensorPipe: over TCP, and in shared memory.
        "EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)",
        # NCCL.
        "NCCL error in: x.cpp:94, remote process exited or there was a network error, NCCL version 2.21.5\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600000",
        # As its socket.cc, os/linux.cc, proxy.cc and net_ib write the last error, of several versions.
        f"{NCCL_SYSTEM}socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host",
        f"{NCCL_SYSTEM}Net : Call to recv from 10.200.84.247<58355> failed : Connection timed out",
        f"{NCCL_INTERNAL}Net : Connection closed by remote peer user<50260>",
        f"{NCCL_INTERNAL}Socket recv failed while polling for opId=0x7f55a4",
        f"{NCCL_SYSTEM}NET/IB: Got completion from peer 10.0.0.3<58912> with status=12 opcode=0 len=0 vendor err 129",
        "NCCL communicator was aborted on rank 3. ",
        "[PG ID 0 Rank 6] Received a dump signal due to a collective timeout from  rank 7 and we will try our best",
        # The Keeper.
        "step 7 is not committed, since its gradients may be incomplete: NCCL reported an error (COMM_ERROR, group 0)",
        "rank 3 is gone or has failed: connection closed by peer (Broken pipe), channel elaunch/0/0/ranks/0",
        "collective operation timeout: waited 1800 s for rank 3, channel elaunch/0/0/ranks/0",
    ],
)
def test_a_survivors_complaint_is_known_as_a_lost_peer(message: str) -> None:
    by_record = failure(1, record_of("DistBackendError", message))
    by_tail = failure(1, tail=f"E1127 {message}\n")

    assert by_record.kind is by_tail.kind is FailureKind.PEER_LOST


@pytest.mark.parametrize(
    ("joined", "kind"),
    [
        ("The above exception was the direct cause of the following exception:", FailureKind.PEER_LOST),
        ("During handling of the above exception, another exception occurred:", FailureKind.EXCEPTION),
    ],
)
def test_an_error_that_a_program_raises_from_that_of_a_lost_peer_is_one_too(joined: str, kind: FailureKind) -> None:
    head = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 3, in step\n    step()\n'
    first, second = (
        f"{head}RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [::1]:3\n",
        f"{head}Failed: step 7\n",
    )

    found = failure(1, tail=f"{first}\n{joined}\n\n{second}")

    assert found.kind is kind
    assert (found.exception, found.message.startswith("lost a peer (RuntimeError: ")) == (
        "Failed",
        kind is FailureKind.PEER_LOST,
    )


TORCH_ERROR = f"RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:31937. This is\n"
KEEPER_ERROR = "elaunch.trainer.ranks.connections.PeerLost: connection closed by peer\n"


@pytest.mark.parametrize(
    ("frames", "error", "call"),
    [
        (
            "torch/distributed/c10d_logger:wrapper torch/distributed/distributed_c10d:all_reduce",
            TORCH_ERROR,
            "all_reduce",
        ),
        ("torch/_tensor:backward torch/autograd/graph:_engine_run_backward", TORCH_ERROR, "backward"),
        ("torch/nn/modules/module:_call_impl", TORCH_ERROR, ""),
        # The public function of the exchange between ranks.
        ("{0}ranks/peers:all_gather {0}ranks/peers:_reduce {0}ranks/connections:receive", KEEPER_ERROR, "all_gather"),
        ("{0}link:should_stop {0}link:_any_due {0}ranks/peers:all_reduce_max", KEEPER_ERROR, "should_stop"),
    ],
)
def test_a_lost_peer_is_named_with_the_call_that_waited_for_it(frames: str, error: str, call: str) -> None:
    places = [frame.split(":") for frame in frames.format("elaunch/trainer/").split()]
    stack = "".join(
        f'  File "/v/lib/python3.11/site-packages/{file}.py", line 83, in {function}\n    wait()\n'
        for file, function in places
    )
    tail = f'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    f()\n{stack}{error}'

    lost = failure(1, tail=tail)

    assert (lost.kind, lost.call, lost.frame) == (FailureKind.PEER_LOST, call, "train.py:3 in step")
    assert lost.message.startswith(f"lost a peer in {call} (" if call else "lost a peer (RuntimeError")


def test_a_collective_that_timed_out_is_not_reported_as_a_lost_peer() -> None:
    # The peer may live, and have entered another collective.
    error = f"RuntimeError: {GLOO}unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete\n"

    found = failure(1, tail=f'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    f()\n{error}')

    assert found.kind is FailureKind.PEER_LOST
    assert found.message.startswith("timed out waiting for a peer (RuntimeError: Timed out waiting 8000ms for recv")


def test_a_survivor_that_nccls_watchdog_aborts_lost_a_peer() -> None:
    aborted = failure(-6)
    tail = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: NCCL error in: x.cpp:94, "
        "remote process exited or there was a network error\n"
    )

    whole = with_tail(aborted, tail)

    assert aborted.kind is FailureKind.SIGNAL
    assert (whole.kind, whole.code) == (FailureKind.PEER_LOST, -6)
    assert with_tail(aborted, "assert.c:3: x > 0\n").kind is FailureKind.SIGNAL


@pytest.mark.parametrize(
    ("exception", "message", "kind"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB", FailureKind.OUT_OF_MEMORY),
        ("torch.cuda.OutOfMemoryError", "HIP out of memory", FailureKind.OUT_OF_MEMORY),
        ("RuntimeError", "CUDA out of memory. Tried to allocate", FailureKind.OUT_OF_MEMORY),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.",
            FailureKind.OUT_OF_MEMORY,
        ),
        # The kernel's errors alone are those of torch's sockets.
        *(
            (exception, message, FailureKind.PEER_LOST)
            for exception in ("RuntimeError", "torch.distributed.DistNetworkError")
            for message in ("Connection reset by peer", "Broken pipe", "Connection timed out")
        ),
    ],
)
def test_an_allocation_that_fails_and_an_error_of_torchs_sockets_are_known(
    exception: str, message: str, kind: FailureKind
) -> None:
    assert failure(1, record_of(exception, message)).kind is kind


REQUESTS = "HTTPSConnectionPool(host='hub', port=443): Max retries exceeded with url: /m (Caused by "


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        *(("ValueError", text) for text in ("bad peer group", "the pipe is broken", "connection to the database lost")),
        ("requests.exceptions.ConnectionError", f"{REQUESTS}NewConnectionError('<x>: [Errno 113] No route to host'))"),
        ("psycopg2.OperationalError", 'connection to server at "db", port 5432 failed: Connection refused'),
        ("aiohttp.client_exceptions.ClientOSError", "[Errno 32] Broken pipe"),
        ("OSError", "[Errno 101] Network is unreachable"),
        ("RuntimeError", "cannot reach the feature store: Connection timed out"),
        ("socket.gaierror", "[Errno -2] Name or service not known"),
        (
            "torch.distributed.DistNetworkError",
            "The IPv4 network addresses of (x, 1) cannot be retrieved (gai error: -2)",
        ),
        ("RuntimeError", f"{GLOO}device.cc:84] Unable to find address for: eth7"),
        (
            "RuntimeError",
            f"Gloo connectFullMesh failed with [enforce fail at {GLOO[1:]}socket.cc:24] socket: Too many open files",
        ),
        ("RuntimeError", f"[enforce fail at {GLOO[1:]}pair.cc:446] op.preamble.length <= op.nbytes. 10008 vs 80"),
        (
            "torch.distributed.DistBackendError",
            f"{NCCL_SYSTEM}Error while creating shared memory segment /dev/shm/nccl-x (size 9), error: No space left",
        ),
        (
            "torch.distributed.DistBackendError",
            "NCCL communicator was aborted on rank 3.  Original reason for failure was: CUDA error: device-side assert",
        ),
    ],
)
def test_an_error_of_the_ranks_own_is_no_lost_peer(exception: str, message: str) -> None:
    by_record = failure(1, record_of(exception, message))
    by_tail = failure(1, tail=f"E1127 {message}\n")

    assert (by_record.kind, by_tail.kind) == (FailureKind.EXCEPTION, FailureKind.EXIT_CODE)


def test_output_that_arrives_after_the_exit_explains_it() -> None:
    early = failure(1)
    tail = 'Traceback (most recent call last):\n  File "/home/u/t.py", line 3, in f\nValueError: late\n'

    whole = with_tail(early, tail)

    assert early.kind is FailureKind.EXIT_CODE
    assert (whole.kind, whole.message) == (FailureKind.EXCEPTION, "raised ValueError: late")
    assert whole.tail == tail
    assert (whole.rank, whole.local_rank, whole.pid, whole.failed_at) == (5, 1, 4711, 1.5)


FRAMES = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 3, in f\n    load(path)\n'
MISSING = "".join(f'\t"layers.{number}.weight" is missing\n' for number in range(100_000))


@pytest.mark.parametrize("text", ["x" * 8_000_000, f"Error(s) in loading state_dict:\n{MISSING}"], ids=["line", "list"])
def test_a_failure_with_megabytes_of_text_is_recognised_and_has_a_short_record(text: str) -> None:
    stack = f"{FRAMES}RuntimeError: {text}"

    raised = failure(1, record_of("RuntimeError", text, stack))
    whole = with_tail(raised, stack[-65536:])

    assert (raised.kind, raised.exception, raised.frame) == (
        FailureKind.EXCEPTION,
        "RuntimeError",
        "/home/u/train.py:3 in f",
    )
    assert raised.message.startswith(f"raised RuntimeError: {text[:20]}")
    assert raised.traceback.startswith(FRAMES)
    assert "are left out here" in raised.traceback
    assert raised.is_cut
    assert len(encode(whole)) < 64 << 10


def test_what_was_printed_before_a_traceback_is_kept_where_both_together_are_too_long() -> None:
    stack = f"{FRAMES}RuntimeError: {'x' * 9000}"
    tail = f"epoch 1\nepoch 2\n[rank5]: {stack}\n"

    raised = with_tail(failure(1, record_of("RuntimeError", "x" * 9000, stack)), tail)

    assert raised.tail == "epoch 1\nepoch 2\n"


def test_a_lost_peer_is_searched_at_the_ends_of_megabytes_of_text() -> None:
    padding, lost = "x" * 100_000_000, "Connection reset by peer"

    began_s = time.process_time()
    found = [is_peer_lost("RuntimeError", text) for text in (f"{lost} {padding}", f"{padding} {lost}", padding)]

    assert found == [True, True, False]
    # To search all of it takes 60 ns for each character.
    assert time.process_time() - began_s < 2.0


@pytest.mark.parametrize(
    ("progressed", "lived_s", "known"), [(False, 99.0, False), (None, 99.0, True), (None, 9.0, None)]
)
def test_a_program_that_reports_nothing_has_made_progress_after_a_minute(
    progressed: bool | None, lived_s: float, known: bool | None
) -> None:
    whole = with_tail(replace(failure(2, progressed=progressed), lived_s=lived_s), "usage: train.py\n")

    assert whole.progressed is known
    assert (whole.kind is FailureKind.STARTUP) == (not known)
