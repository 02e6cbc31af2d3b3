"""Makes a `Failure` from what a worker left: status, error file, output, faulthandler's stack, a lost peer; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elaunch.rendezvous.codec import shown
from elaunch.rendezvous.types import TAIL, TRACEBACK, Failure, FailureKind
from elaunch.strict_json import parse_json
from elaunch.threads import only_listens

# Files that are not the user's: an error's location is a frame outside of them.
NOT_USER_CODE = re.compile(
    r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|^<frozen "
    # Where the trainer's ranks wait for each other, and what calls a job's function; also in a checkout.
    r"|[/\\]elaunch[/\\](?:trainer[/\\]ranks|launcher[/\\]functions)[/\\]"
)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$', re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# The message of a DataLoader's exception has the traceback of its worker.
_JOINTS = (*_CHAINED, "\nOriginal ", "]: Original ")
# torch.distributed puts this before each line of an uncaught exception (its sys.excepthook).
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)

_SYNTAX_ERROR = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)\n(?:    .*\n)*'
    r"(?P<type>SyntaxError|IndentationError|TabError): (?P<message>.*)$",
    re.MULTILINE,
)

# The last line of `python -m` about a module that does not exist; it comes without a traceback.
_NO_MODULE = re.compile(
    r"\S+: (?P<message>(?:No module named|Error while finding module specification for"
    r"|No code object available for) .*)"
)
# Only blank lines stand between the sentence that joins two tracebacks and the second one.
_CHAIN_CHARACTERS_MAX = 200

_OUT_OF_MEMORY = re.compile(r"\bOutOfMemoryError\b|CUDA out of memory|DefaultCPUAllocator: can't allocate memory")
# Where torch, the Keeper and the link wait for other ranks. A backward pass waits there for the gradients' all-reduce.
_COLLECTIVES = re.compile(
    r"[/\\]torch[/\\](?:distributed[/\\]|_tensor\.py$)"
    r"|[/\\]elaunch[/\\]trainer[/\\](?:link|ranks[/\\]peers)\.py$"
)
_WRAPPERS = {"wrapper", "inner", "<lambda>"}
_EVEN_STEPS = (
    "give every rank the same number of steps and collective calls: find a `return`, `break` or `sys.exit` that"
    " only this rank reaches, or for a data loader that is shorter on this rank (drop_last=True, or DDP's join())"
)
# A program that reports nothing counts as having made progress after this time.
SILENT_S = 60.0
_NO_EXIT = "find what keeps the process from exiting: an exit function (atexit), or a thread that is not a daemon"
# The exception by which pdb ends a program, after q or at the end of its input.
_DEBUGGER_LEFT = "BdbQuit"
# This much of a message is searched.
_MESSAGE_CHARACTERS_MAX = 64 << 10
_STARTUP_TYPES = {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"}
_SIGABRT, _SIGKILL, _SIGTERM = 6, 9, 15
# The signals by which an agent may end a process before Python has returned its exit code for an exception, and the one
# by which C++ aborts if a thread still runs then.
_ON_THE_WAY_OUT, _EXCEPTION_CODE = (-_SIGKILL, -_SIGTERM, -_SIGABRT), 1
# 126 and 127 are the shell's.
_STARTUP_CODES = {2: "the exit code of a wrong command line", 126: "cannot be executed", 127: "not found"}


@dataclass(frozen=True)
class Raised:
    """An uncaught exception: its type, its text, the innermost frame in the user's code, the printed traceback.

    With `is_cut` the middle of the traceback was left out. `call` is the function of torch in which the rank waited for
    others, or empty.
    """

    exception: str = ""
    message: str = ""
    frame: str = ""
    traceback: str = ""
    is_cut: bool = False
    call: str = ""


@dataclass(frozen=True)
class Remains:
    """What a worker left behind.

    `code` is the exit code or minus the signal. `error_record` is the text of its TORCHELASTIC_ERROR_FILE, `tail` the
    end of its stderr; both may be empty or torn. `kernel` is what the kernel logged about it. `raised`: its program
    had ended with an exception before a signal ended the process; `returned`: it had without one, with `own_code`, if
    that is known. `crash` is what faulthandler wrote. `lost` is the error that reported a lost peer, `refused` why it
    refused to run, if that is known.
    """

    code: int
    error_record: str = ""
    tail: str = ""
    kernel: str = ""
    crash: str = ""
    progressed: bool | None = None
    raised: bool = False
    returned: bool = False
    own_code: int | None = None
    lost: Raised | None = None
    refused: str = ""


def failure_of(worker: Failure, remains: Remains, signal_name: str) -> Failure:
    """`worker` completed with how it failed. `signal_name` is that of signal `-remains.code`, if any."""
    raised = parse_record(remains.error_record) or parse_traceback(remains.tail)
    if remains.code < 0 and not remains.raised and (crashed := parse_crash(remains.crash, remains.code)):
        stack = crashed.traceback
        raised = replace(crashed, traceback=TRACEBACK.of(stack), is_cut=not TRACEBACK.fits(stack))
    has_crashed = remains.code in CRASH_CODES
    if raised and remains.raised and remains.code in _ON_THE_WAY_OUT:
        # The exit of a process may take a second. Its peers may report a lost peer meanwhile.
        remains = replace(remains, code=_EXCEPTION_CODE)
    kind, message = _kind_and_message(remains, raised, signal_name)
    if raised and remains.raised and has_crashed:
        message = f"{message}, and was then killed by {signal_name}"
    call = next((each.call for each in (raised, remains.lost) if each and each.call), "")
    raised = raised or Raised()
    found = {name: getattr(raised, name) for name in ("exception", "frame", "traceback", "is_cut")}
    tail = _kept(remains.tail, raised.traceback)
    return replace(worker, kind=kind, code=remains.code, message=message, call=call, tail=tail, **found)


def end_of(worker: Failure, clock: str, *, is_gone: bool) -> Failure:
    """The record of a program that ended without an exception, which is a failure only if other ranks still waited.

    `worker` as in `failure_of`, `clock` is the time of day. A process that has not exited has no code, nor has one that
    a signal ended while it exited.
    """
    if is_gone:
        how = f"ended with exit code 0 at {clock}"
        return replace(worker, kind=FailureKind.ENDED_EARLY, code=0, message=how, advice=_EVEN_STEPS)
    how = "reached the end of its program, but did not exit in time"
    return replace(worker, kind=FailureKind.ENDED_EARLY, message=how, advice=_NO_EXIT)


def with_tail(failure: Failure, tail: str) -> Failure:
    """The same failure, now that all of the worker's output has arrived."""
    # A program that reports nothing, such as a command, has made progress if it ran long enough.
    progressed = failure.progressed if failure.progressed is not None else failure.lived_s >= SILENT_S or None
    failure = replace(failure, tail=_kept(tail, failure.traceback), progressed=progressed)
    if failure.code == -_SIGABRT and PEER_LOST.search(tail):
        # NCCL's watchdog aborts survivors.
        return replace(failure, kind=FailureKind.PEER_LOST)
    if failure.code is not None and failure.code < 0:
        return _crashed(failure, tail)
    if failure.code is None or not failure.message.startswith("exited with"):
        # Nothing can be added to what an error file has.
        return failure
    return failure_of(failure, Remains(failure.code, tail=tail, progressed=progressed), "")


def _crashed(failure: Failure, tail: str) -> Failure:
    """A death by a signal, with what the output adds: the program's own faulthandler's stack, or C++'s message."""
    assert failure.code is not None
    if not failure.traceback and (found := parse_crash(tail, failure.code)):
        failure = replace(failure, frame=found.frame, traceback=found.traceback)
    thrown = _abort_text(tail) if failure.code == -_SIGABRT else ""
    frame = failure.frame if is_crash_stack(failure.traceback) else ""
    if failure.kind is not FailureKind.SIGNAL or not (thrown or frame):
        return failure
    return replace(failure, message=failure.message.partition(" (")[0] + _crash_text(frame, thrown))


def parse_record(text: str) -> Raised | None:
    """The exception in an error file as torch's `@record` and our workers write it; None if it is torn or malformed.

    Its message and traceback may have any length. They are cut to what fits into a failure record.
    """
    try:
        message = parse_json(text)["message"]
        if isinstance(message, str):
            return Raised(message=message[:_MESSAGE_CHARACTERS_MAX])
        error, stack = _text(message["message"]), _text(message.get("extraInfo", {}).get("py_callstack", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    is_cut, error, stack = not TRACEBACK.fits(stack), error[:_MESSAGE_CHARACTERS_MAX], TRACEBACK.of(stack)
    raised = parse_traceback(stack)
    if raised is None:
        return Raised(error.partition(":")[0], error.partition(":")[2].strip(), "", stack, is_cut)
    return replace(raised, traceback=stack.rstrip(), is_cut=is_cut)


def _text(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def shows_only_lost_peer(text: str) -> bool | None:
    """Whether all tracebacks in `text` are only of a lost peer; None while the last is incomplete."""
    raised = parse_traceback(text)
    if raised is None:
        return None
    earlier = (parse_traceback(_TRACEBACK + rest) for rest in text.split(_TRACEBACK)[1:-1])
    return _is_lost_peer(raised) and all(each is None or _is_lost_peer(each) for each in earlier)


def chain_start(text: str) -> int:
    """Where the last traceback in `text` begins, with the exceptions that it was raised from; -1 without one."""
    start = text.rfind(_TRACEBACK)
    while start >= 0 and text[max(start - _CHAIN_CHARACTERS_MAX, 0) : start].rstrip("\n").endswith(_JOINTS):
        before = text.rfind(_TRACEBACK, 0, start)
        if before < 0:
            break
        start = before
    # To the line's start: torch.distributed puts the rank before it.
    return text.rfind("\n", 0, start) + 1 if start >= 0 else -1


def parse_traceback(text: str) -> Raised | None:
    """The last exception that Python printed in `text`, or None."""
    text = _RANK_PREFIX.sub("", text)
    start = text.rfind(_TRACEBACK)
    if start < 0:
        if module := _NO_MODULE.fullmatch(text.rstrip().rpartition("\n")[2]):
            return Raised("ModuleNotFoundError", module["message"], "", module[0])
        # A syntax error in the program itself has no frames, and so no such line.
        syntax = [*_SYNTAX_ERROR.finditer(text)]
        if not syntax:
            return None
        last = syntax[-1]
        return Raised(last["type"], last["message"], f"{last['file']}:{last['line']}", last[0].rstrip())
    body = text[start:]
    frames = list(_FRAME.finditer(body))
    rest = body[frames[-1].end() :] if frames else body[len(_TRACEBACK) :]
    # The exception's line is the first one after the frames that is not indented; its message may continue below.
    line = re.search(r"^(?=[A-Za-z_])", rest, re.MULTILINE)
    if line is None:
        return None
    printed = _EXCEPTION.match(rest[line.start() :].rstrip().partition("\n\n")[0])
    if printed is None:
        return None
    whole = text[chain_start(text) :].rstrip()
    # Python 3.10 writes __main__.MyError, later ones MyError.
    exception = printed["type"].removeprefix("__main__.")
    return Raised(exception, (printed["message"] or "").strip(), _user_location(frames, -1), whole, call=_call(frames))


def _call(frames: Sequence[re.Match[str]]) -> str:
    """The function in which the rank waited for others: torch.distributed's last one, `backward`, or the Keeper's.

    A public one comes before a private one.
    """
    calls = [f["function"] for f in frames if f["function"] and _COLLECTIVES.search(f["file"])]
    if "should_stop" in calls:
        # The link's, which waits for the others as the Keeper does.
        return "should_stop"
    named = [call for call in reversed(calls) if call not in _WRAPPERS]
    return next((call for call in named if not call.startswith("_")), named[0] if named else "")


def _user_location(frames: Sequence[re.Match[str]], index: int) -> str:
    """The location of the first or last frame of the user's code, or else of any; empty without frames."""
    mine = [frame for frame in frames if not NOT_USER_CODE.search(frame["file"])] or frames
    if not mine:
        return ""
    frame = mine[index]
    return f"{frame['file']}:{frame['line']}" + (f" in {frame['function']}" if frame["function"] else "")


def _kept(tail: str, traceback: str) -> str:
    """The end of the output for the failure record; a long one without the traceback, which the record has already."""
    if not traceback or TAIL.fits(tail):
        return tail
    start = chain_start(tail)
    return tail[:start] if start >= 0 else tail


def _kind_and_message(remains: Remains, raised: Raised | None, signal_name: str) -> tuple[FailureKind, str]:
    code = remains.code
    if code < 0 and not (remains.raised and raised):
        killed = f"was killed by {signal_name}"
        if remains.kernel:
            return FailureKind.OUT_OF_MEMORY, f"{killed} ({remains.kernel})"
        if remains.raised and code == -_SIGKILL:
            # Killed by its agent, which had waited for its exit.
            return FailureKind.SIGNAL, f"raised an exception, did not exit, and {killed}"
        if remains.returned:
            ended = "" if remains.own_code is None else f" with exit code {remains.own_code}"
            killed = f"{killed} after its program had ended{ended}"
        return FailureKind.SIGNAL, killed + _crash_text(raised.frame if raised and remains.crash else "")
    if remains.refused:
        return FailureKind.REFUSED, f"refused to run{_ending(remains.refused)}"
    if raised is None:
        if code in _STARTUP_CODES and not remains.progressed:
            return FailureKind.STARTUP, f"exited with code {code} ({_STARTUP_CODES[code]})"
        if remains.lost:
            # The program has caught the error.
            return FailureKind.PEER_LOST, f"{_lost(remains.lost)} and exited with code {code}"
        kind = FailureKind.PEER_LOST if PEER_LOST.search(remains.tail) else FailureKind.EXIT_CODE
        return kind, f"exited with code {code}"
    if raised.exception.rpartition(".")[2] == _DEBUGGER_LEFT:
        return FailureKind.DEBUGGER, "left its debugger (BdbQuit)"
    message = f"raised {raised.exception or 'an error'}{_ending(raised.message)}"
    if raised.exception.rpartition(".")[2] in _STARTUP_TYPES and not remains.progressed:
        return FailureKind.STARTUP, message
    if _OUT_OF_MEMORY.search(f"{raised.exception}: {raised.message}"):
        return FailureKind.OUT_OF_MEMORY, message
    # A program may raise its own error from that of a lost peer.
    chain = [*map(parse_traceback, raised.traceback.split(_CHAINED[1])[:-1]), raised]
    if lost := next((each for each in chain if each and _is_lost_peer(each)), None):
        return FailureKind.PEER_LOST, _lost(lost)
    if remains.lost:
        return FailureKind.PEER_LOST, f"{_lost(remains.lost)} and {message}"
    return FailureKind.EXCEPTION, message


def _lost(raised: Raised) -> str:
    where = f" in {raised.call}" if raised.call else ""
    # A C++ message without the location in torch's sources before it and the advice after it.
    message = re.sub(r"^\[[^]]*:\d+\] ", "", raised.message.partition("\n")[0]).partition(". ")[0].rstrip(".")
    what = "timed out waiting for a peer" if re.search(TIMED_OUT, message, re.IGNORECASE) else "lost a peer"
    return f"{what}{where} ({raised.exception}: {message})"


def _ending(message: str) -> str:
    """The message as the end of a sentence: its first line, since the rest is in the traceback or in the output."""
    first, more, _ = message.partition("\n")
    return f": {first} …" if more else f": {first}" if first else ""


def _is_lost_peer(raised: Raised) -> bool:
    return is_peer_lost(raised.exception, raised.message, in_torch=bool(raised.call))


# faulthandler's names of the signals that it handles (CPython, Modules/faulthandler.c).
_NAMES = {
    -4: ("Illegal instruction",),
    -6: ("Aborted",),
    -7: ("Bus error",),
    -8: ("Floating point exception", "Floating-point exception"),
    -11: ("Segmentation fault",),
}
CRASH_CODES = frozenset(_NAMES)
_FATAL = "Fatal Python error: "
_CURRENT = re.compile(r"^Current thread 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)
_THROWN = re.compile(r"^terminate called after throwing an instance of '(?P<type>[^'\n]{1,200})'$", re.MULTILINE)
_WHAT = re.compile(r"^ *what\(\): +(?P<text>.+)$", re.MULTILINE)
_STACK_LINES_MAX = 200


def parse_crash(text: str, code: int) -> Raised | None:
    """The last stack that faulthandler wrote into `text` for the signal `-code`.

    Its frame is the innermost one of the user's code in the thread that crashed, empty if it ran no Python.
    """
    start = max((text.rfind(_FATAL + name) for name in _NAMES.get(code, ())), default=-1)
    if start < 0:
        return None
    lines = text[start:].splitlines()
    # After the stacks Python 3.10 and later list the extension modules.
    end = next((i for i, line in enumerate(lines) if line.startswith("Extension modules:")), len(lines))
    stack = "\n".join(lines[: min(end, _STACK_LINES_MAX)]).rstrip()
    current = _CURRENT.search(stack)
    text = "\n\n".join(block for block in stack.split("\n\n") if not _only_listens(block))
    if current is None:
        return Raised(traceback=text)
    own = stack[current.end() :].partition("\n\n")[0]
    return Raised(frame=_user_location(list(_FRAME.finditer(own)), 0), traceback=text)


def _only_listens(block: str) -> bool:
    """Whether it is the stack of a thread by which elaunch listens in the worker."""
    files = [frame["file"] for frame in _FRAME.finditer(block)]
    return block.startswith("Thread ") and bool(files) and only_listens(files)


def is_crash_stack(text: str) -> bool:
    """Whether `text` is a stack as `parse_crash` returns it."""
    return text.startswith(_FATAL)


def _abort_text(tail: str) -> str:
    """The C++ exception that ended a process by SIGABRT: its type and the first line of its text."""
    thrown = list(_THROWN.finditer(tail))
    if not thrown:
        return ""
    what = _WHAT.search(tail, thrown[-1].end())
    return f"{thrown[-1]['type']}: {what['text'].strip()}" if what else thrown[-1]["type"]


def _crash_text(frame: str, thrown: str = "") -> str:
    """The text after "was killed by SIGSEGV", in brackets."""
    parts = [text for text in (frame and f"crashed in {frame}", thrown) if text]
    return f" ({'; '.join(parts)})" if parts else ""


# --- the errors of a survivor

# The errors of gloo and the Keeper's connections after a collective's timeout, with the time waited; case-insensitive.
TIMED_OUT = (
    r"timed out waiting (?P<ms>\d{1,20})ms for (?:recv|send) operation"
    r"|collective operation timeout: waited (?P<s>\d[\d.e+]{0,12}) s for"
)
# The errors of a connection whose peer is gone, as glibc words them.
_NETWORK = (
    r"connection (?:reset by peer|refused|timed out)|software caused connection abort|broken pipe|no route to host"
    r"|(?:network|machine) is (?:unreachable|down|not on the network)|host is down|network dropped connection on reset"
    r"|transport endpoint is not connected|cannot send after transport endpoint shutdown"
)
# Where gloo's transport names its source: "[…/gloo/transport/tcp/pair.cc:553] ". Its other errors are the rank's own.
_GLOO = r"\[(?:enforce fail at )?(?:[^\s\]]{0,200}\bgloo/[^\s\]]{0,100}|(?:unbound_)?(?:buffer|pair))\.cc:\d{1,6}\] "
# How NCCL names the peer, gloo an address, and torch's TCPStore a socket.
_OTHER_END = r"(?:\S<\d{1,5}>|\bSO_ERROR:|\b(?:recv|send)\w{0,30} failed\b|\bCall to (?:connect|recv|send) failed ?:)"
# The errors of survivors when another rank is gone: gloo's, TCPStore's, NCCL's, RPC's TensorPipe's. A network error
# alone may be the program's own: it counts only after text that a library that connects ranks writes.
PEER_LOST = re.compile(
    rf"(?:{_GLOO}|connectFullMesh failed with )[^\n]{{0,300}}?(?:connection closed|socket (?:unexpectedly )?closed"
    rf"|(?:read|write|connect) timeout|timed out|no error|SSL_(?:read|write) |short (?:read|write)|pair is not"
    rf"|{_NETWORK})"
    rf"|{_OTHER_END}[^\n]{{0,300}}?(?:{_NETWORK})"
    r"|application timeout caused pair closure|failed to pass monitoredBarrier|logs for faulty rank"
    r"|ncclRemoteError|remote process exited|connection closed by (?:remote peer|peer \[)|got completion from peer"
    r"|socket recv failed while polling for opId|NCCL timeout (?:in|when)"
    r"|collective operation timeout|collective timeout from"
    # The reason may be one of this rank itself.
    r"|NCCL communicator was aborted on rank \d{1,9}\.(?! {0,2}Original reason)"
    r"|0 bytes\. connection was likely closed|(?-i:Socket Timeout)"
    r"|client socket has (?:failed to connect|timed out)|seconds waiting for clients"
    r"|\(this error originated at tensorpipe/"
    # The Keeper's messages about a group, and about its own connections.
    r"|\((?:TIMEOUT|COMM_ERROR|REMOTE_ERROR), group \w|\brank \d{1,9} is gone or has failed: "
    rf"|{TIMED_OUT}",
    re.IGNORECASE,
)
# torch's own exceptions. In an older torch, they are a RuntimeError with the kernel's message.
_TORCH_TYPES = {"DistNetworkError", "DistBackendError", "DistStoreError", "DistError"}
# A search takes 60 ns for each character, so only this much of each end of a longer message is searched.
_END_CHARACTERS = 8 << 10
# Raised by Python's own sockets and pipes: an upload, a closed terminal. torch has types of its own for its peers.
_PYTHON_SOCKET_TYPES = {
    *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    *("BrokenPipeError", "TimeoutError"),
}


def is_peer_lost(exception: str, message: str, *, in_torch: bool = True) -> bool:
    """Whether an exception of type `exception` only reports that another rank is gone.

    `in_torch`: it was raised while the rank waited for others in torch, or that is not known.
    """
    name = exception.rpartition(".")[2]
    if name in _PYTHON_SOCKET_TYPES:
        return False
    text = ends(message)
    if name == "PeerLost" or PEER_LOST.search(text):
        return True
    # Not compiled at import: few errors get here.
    if name in _TORCH_TYPES or (name == "RuntimeError" and in_torch):
        return bool(re.search(_NETWORK, text, re.IGNORECASE))
    return name == "RuntimeError" and bool(re.fullmatch(_NETWORK, text.strip(), re.IGNORECASE))


def ends(message: str) -> str:
    """The part of a message to search: its ends, if it is long. A program may raise megabytes, with the cause there."""
    if len(message) <= 2 * _END_CHARACTERS:
        return message
    return f"{message[:_END_CHARACTERS]}\n{message[-_END_CHARACTERS:]}"
