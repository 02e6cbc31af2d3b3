"""A thread in a worker that responds to the agent's queries about its collectives (torch's flight recorder).

The thread runs while the program has a default process group, and sleeps until the agent's query. It also responds
while the main thread waits in a collective. A fresh worker imports this before its program, so it imports as little as
it can, and nothing at all once the program runs: torch has imported what is needed.
"""

from __future__ import annotations

import os
import sys

from elaunch.agent.forkserver import reports

# `typing` itself is not imported: a fresh worker imports this before its program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

C10D = "torch.distributed.distributed_c10d"
_NATIVE = "torch._C._distributed_c10d"
# In characters.
_ERROR_MAX = 1000
# Collectives on a GPU have a recorder of their own.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_QUERY_BYTES_MAX = 32
_PACKET_BYTES_MAX = 64 << 10


def prepare(c10d: ModuleType | None) -> None:
    """Run the thread while this process has a default process group. `c10d` is torch's module, if it is loaded."""
    thread, own_port = _RecorderThread(), os.environ.get("MASTER_PORT", "")
    generation = os.environ.get("ELAUNCH_GENERATION", "0")

    def found(c10d: ModuleType) -> None:
        thread.follow(c10d)
        rendezvous: Any = getattr(getattr(c10d, "rendezvous", None), "__globals__", {})
        _use_agents_store_at(own_port, rendezvous)
        if generation != "0":
            _separate_file_stores_of(generation, rendezvous, getattr(c10d, "PrefixStore", None))

    if c10d is None:
        # Just before Python's own search of sys.path: a finder of the program's stays the first.
        sys.meta_path.insert(-1, _Finder(found))
    else:
        found(c10d)


def _use_agents_store_at(own_port: str, rendezvous: dict[str, Any]) -> None:
    """Make torch treat only the store at that port as the agent's, and host the program's own stores.

    torch would try to connect to a server at every address (torch/distributed/rendezvous.py, pytorch/pytorch#192113).
    """
    uses: Any = rendezvous.get("_torchelastic_use_agent_store")
    if uses is None:
        return

    def _torchelastic_use_agent_store(*args: Any, **kwargs: Any) -> bool:
        # torch's function does not get the port. Its caller has it.
        port = sys._getframe(1).f_locals.get("port", own_port)
        return bool(uses(*args, **kwargs)) and str(port) == own_port

    rendezvous["_torchelastic_use_agent_store"] = _torchelastic_use_agent_store


def _separate_file_stores_of(generation: str, rendezvous: dict[str, Any], prefix_store: Any) -> None:
    """Give this generation keys of its own in the file of init_method=file://, which has the dead ranks' addresses."""
    handlers: Any = rendezvous.get("_rendezvous_handlers", {})
    of_file: Any = handlers.get("file")
    if of_file is None or prefix_store is None:
        return

    def file_rendezvous(*args: Any, **kwargs: Any) -> Any:
        for store, rank, world_size in of_file(*args, **kwargs):
            yield prefix_store(f"generation-{generation}", store), rank, world_size

    handlers["file"] = file_rendezvous


class _Finder:
    """Calls `found` with torch's module at the first import after that module's, and removes itself. Finds nothing."""

    def __init__(self, found: Callable[[ModuleType], None]) -> None:
        self._found = found
        self._has_found = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        c10d = sys.modules.get(C10D)
        # Only one thread at a time is here: Python holds its import lock while it calls a finder.
        if c10d is not None and hasattr(c10d, "_update_default_pg") and not self._has_found:
            self._has_found = True
            # A new list: a thread that iterates over the old one misses no finder.
            sys.meta_path = [each for each in sys.meta_path if each is not self]
            self._found(c10d)


class _RecorderThread:
    """Starts the thread when the default process group is made, and ends it when that group is destroyed.

    A thread that ran before would change the program: from Python 3.12 on, `os.fork` warns in a process with several
    threads, and the kernel allows `unshare` only to a process with one. Process groups bring threads of their own.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._link = os.fstat(reports.LINK_FD).st_ino
        self._end: Any = None

    def follow(self, c10d: ModuleType) -> None:
        """Observe every default process group from now on. torch has no public call for that."""
        update: Any = getattr(c10d, "_update_default_pg", None)
        if update is None:
            return

        def _update_default_pg(pg: object) -> None:
            update(pg)
            try:
                self._change(pg)
            except Exception:
                # The program must continue, although the agent then has no report of its collectives.
                return

        vars(c10d)["_update_default_pg"] = _update_default_pg
        os.register_at_fork(after_in_child=self._forked)
        # torch logs each exception of a collective there. The program may catch it, and exit with a code of its own.
        names: Any = getattr(getattr(c10d, "_exception_logger", None), "__globals__", {})
        if logger := names.get("_c10d_logger"):
            logger.addFilter(self._report_error)

    def _change(self, pg: object) -> None:
        # A process that the program forked has its parent's link.
        if os.getpid() != self._pid:
            return
        if self._end is not None:
            self._end.shutdown(2)
            self._end = None
            # Its peers lose it now, whenever its program ends.
            reports.send(self._link, {"event": "left", "monotonic_s": sys.modules["time"].monotonic()})
        # Without a thread of the process group's own, this one would be the only one beside the program's.
        if pg is None or len(os.listdir("/proc/self/task")) == 1:  # noqa: PTH208
            return
        socket: Any = sys.modules.get("_socket")
        native = sys.modules.get(_NATIVE)
        dumps = [getattr(native, name) for name in _DUMPS if hasattr(native, name)]
        if socket is None or not dumps or not reports.is_link(self._link):
            return
        import _thread

        end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, theirs.fileno().to_bytes(4, sys.byteorder))]
            reports.send(self._link, {"event": "recorder"}, rights)
        finally:
            theirs.close()
        self._end = end
        _thread.start_new_thread(_respond, (end, dumps))

    def _report_error(self, record: Any) -> bool:
        kind = sys.exc_info()[0]
        try:
            message = {"event": "error", "call": record.msg["func_name"], "message": record.msg["error"][:_ERROR_MAX]}
            if kind is not None and os.getpid() == self._pid:
                now_s = sys.modules["time"].monotonic()
                reports.send(self._link, {**message, "exception": kind.__qualname__, "monotonic_s": now_s})
        except Exception:
            # Another torch may log something else there.
            pass
        return True

    def _forked(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None


def _respond(end: Any, dumps: list[Any]) -> None:
    """Respond until the agent exits, or the process group is destroyed.

    The query `n` requests the numbers of each group's last collectives.
    """
    import _signal  # type: ignore[import-not-found]

    try:
        # The program's own threads handle signals.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        while query := end.recv(_QUERY_BYTES_MAX):
            if query == b"n":
                text = b"\n".join(dump(False, False) for dump in dumps)
                end.send(query + (text if len(text) < _PACKET_BYTES_MAX else b""))
    except Exception:
        # The agent is gone, or this torch has other functions under these names.
        return
    finally:
        end.close()
