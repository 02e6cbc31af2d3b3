"""Causes: files, disks, networks and limits of the host."""

from __future__ import annotations

from elaunch.agent.diagnosis.causes.cause import CauseRule, Evidence, Space, Values, regex
from elaunch.rendezvous.format import bytes_text

_QUOTED = regex(r"\[Errno \d+\][^\n]*?: (?P<quote>['\"])(?P<path>.*?)(?P=quote)")
# At most this many full file systems are named.
_NAMED_DISKS = 3
MORE_PROCESSES = (
    "raise the limit of processes and threads (ulimit -u, pids.max of the container), or use fewer DataLoader workers"
    " and threads"
)
_WRITER = regex(r"(?:PytorchStreamWriter failed writing file|inline_container\.cc|iostream error)")
_NO_FILE = r"\[Errno 2\] No such file or directory"
# The error of a socket that cannot be bound, perhaps in a thread whose exit goes unnoticed.
SOCKET_PATH = "AF_UNIX path (?:too long|length)"
_STARTS_PROCESS = regex(r"fork|spawn|subprocess|popen|clone|thread")


def _full(evidence: Evidence, _values: Values) -> Values | None:
    """Which file systems are full. That of the path may no longer be: another process may have removed files."""
    if spaces := evidence.facts.full:
        named = spaces[:_NAMED_DISKS]
        where = ", or ".join(map(_lack, named)) + (", or another one" if spaces[_NAMED_DISKS:] else "")
        return {"where": where, "disk": " or ".join(space.mount for space in named)}
    if "No space left" in evidence.text:
        at = f" at {found['path']}" if (found := _QUOTED.search(evidence.text)) and found["path"] else ""
        return {"where": "", "disk": f"the file system that the program writes to{at}"}
    return None


def _lack(space: Space) -> str:
    if space.is_full:
        return f"{space.mount} has {bytes_text(space.free)} free of {bytes_text(space.total)}"
    return f"no more files can be created on {space.mount}"


def _no_process(evidence: Evidence, _values: Values) -> Values | None:
    """EAGAIN is also the error of a lock that is taken and of a socket that is not ready."""
    call = "\n".join(evidence.traceback.splitlines()[-4:])
    is_other = "[Errno 11]" in evidence.text and call and not _STARTS_PROCESS.search(call)
    return None if is_other else {}


RULES = (
    CauseRule(
        "a disk is full",
        "make room on {disk}, or write somewhere else",
        pattern=rf"No space left on device|{_WRITER.pattern}",
        detail="{where}",
        more=_full,
        needs_disks=True,
    ),
    CauseRule(
        "a disk quota is exceeded",
        "remove files, or request more: the user's or the project's quota is used up (quota -s, lfs quota)",
        pattern=r"Disk quota exceeded",
    ),
    CauseRule(
        "a read-only file system",
        "write to a folder that can be written: this file system is mounted read-only",
        pattern=r"\[Errno 30\] Read-only file system",
    ),
    CauseRule(
        "too many open files",
        "raise the limit (ulimit -n, LimitNOFILE= of systemd), or close files; DataLoaders need fewer with"
        " torch.multiprocessing.set_sharing_strategy('file_system')",
        pattern=r"Too many open files(?! in system)|received 0 items of ancdata",
    ),
    CauseRule(
        "a socket's path is too long",
        "a socket's path may have 107 characters: set TMPDIR to a folder of at most 75, like /tmp, since"
        " multiprocessing (like DataLoader workers) makes its sockets below it",
        pattern=rf"{SOCKET_PATH}|torch_shm_manager at [^\n]{{1,4096}}: (?:Invalid argument|File name too long)",
    ),
    CauseRule(
        "no more processes or threads",
        MORE_PROCESSES,
        pattern=(
            r"can't start new thread|\[Errno 11\] Resource temporarily unavailable|pthread_create failed"
            r"|Thread creation failed"
        ),
        more=_no_process,
    ),
    CauseRule(
        "a port is in use",
        "another process listens on that port (ss -ltnp shows it): let the script take a free one (port 0), or the"
        " MASTER_PORT of its environment",
        pattern=r"\[Errno 98\]|EADDRINUSE|address already in use",
    ),
    CauseRule(
        "an address of another host",
        "no interface of this node has that address (ip -br addr shows them): listen on 0.0.0.0 or on an address of"
        " this node",
        pattern=r"\[Errno 99\]|EADDRNOTAVAIL|Cannot assign requested address",
    ),
    CauseRule(
        "an address that cannot be reached",
        "this node has no route to that host: check the address, the routes and the firewall",
        pattern=r"\[Errno 113\]|\[Errno 101\]|No route to host|Network is unreachable",
    ),
    CauseRule(
        "a connection is refused",
        "no process listens at that address and port: check both, and that the service runs",
        pattern=r"\[Errno 111\] Connection refused",
        exceptions=frozenset({"ConnectionRefusedError", "URLError", "OSError"}),
    ),
    CauseRule(
        "a file does not exist",
        "check the spelling of the path, and that its file system is mounted on this node",
        pattern=rf"{_NO_FILE}: ['\"]/[^/'\"]+/",
        exceptions=frozenset({"FileNotFoundError"}),
    ),
    CauseRule(
        "a file with a relative path does not exist",
        "the path is relative to the folder where elaunch was started: give an absolute path, or start it there",
        # An address, such as s3://bucket/x, is no such path.
        pattern=rf"{_NO_FILE}: ['\"](?!/|[^'\"]*://)",
        exceptions=frozenset({"FileNotFoundError"}),
    ),
    CauseRule(
        "permission denied",
        "this user may not open {path} in that way: ls -l shows its owner and mode",
        pattern=r"(?-i:\[Errno 13\] Permission denied: )(?P<quote>['\"])(?P<path>.*?)(?P=quote)",
        exceptions=frozenset({"PermissionError"}),
    ),
    CauseRule(
        "an I/O error of the storage",
        "the file system fails: check its mount and its server on this node",
        pattern=r"\[Errno (?:5|116|107|121)\] (?:Input/output|Stale file handle|Transport endpoint|Remote I/O)",
    ),
    CauseRule(
        "a torn checkpoint",
        "the file is incomplete, as after a full disk or a kill while it was written: load the one before it",
        pattern=r"PytorchStreamReader failed (?:reading zip archive|finding central directory|reading file)",
    ),
)
