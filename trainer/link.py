"""The worker's link to its agent, for any training script: it reports steps, and receives requests to stop.

The agent leaves one end of a socket pair in the worker, with its descriptor number in `ELAUNCH_LINK`; both sides send
JSON lines. Without the variable every call does nothing, so a script needs no condition around it. Only `should_stop`
imports torch, which its callers have imported already.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elaunch.strict_json import parse_json
from elaunch.threads import stacks_text

# The agent reads once a second, so a line for each of a thousand steps would only fill the socket.
_PAUSE_S = 0.25
# A message that must arrive waits this long for an agent that does not read.
_SURELY_S = 1.0
_PHASE_CHARS_MAX = 100
_REASON_CHARS_MAX = 2000
_STDERR = 2


def report(step: int, total: int = 0) -> None:
    """Report that optimizer step `step`, of `total` if that is known, is complete. Call it after each, from one thread.

    Never waits and never raises. A step that follows too soon after the last reported one is left out.
    """
    _open_link().send_step(step, time.monotonic(), total)


def phase(name: str) -> None:
    """Report the current activity ("evaluating"): a heartbeat while no step completes (`--hang-timeout`).

    Never waits and never raises. Call it when that changes, not in an inner loop.
    """
    _open_link().send(_line(event="phase", name=name[:_PHASE_CHARS_MAX]))


def mark(name: str) -> None:
    """Report that the start of this process has reached a point ("restoring", "restored"), for the run's timeline.

    It is not a heartbeat: what comes next, like a compilation, may take a long time. Never waits and never raises.
    """
    _open_link().send(_line(event="mark", name=name[:_PHASE_CHARS_MAX], monotonic_s=round(time.monotonic(), 6)))


def saving(step: int) -> None:
    """Report that `step` is being saved. After a peer's failure this process then has `--stop-grace` to finish.

    Without this call it has only `--failure-grace`, even if a peer fails during a stop. Call it from any thread; it
    waits for a busy agent, a second at most.
    """
    _open_link().send(_line(event="saving", step=step), _SURELY_S)


def saved(step: int) -> None:
    """Report, after a peer's failure, that the state up to `step` is saved. The agent then kills this process.

    This is the response to `on_peer_failed`: call it each time, even if the state was saved before. It counts once
    every `rescue` has returned. Call it from any thread; it waits for a busy agent, a second at most.
    """
    _open_link().send_saved(step)


def stopped(step: int) -> None:
    """Report that this process, like all ranks, has stopped after `step`, and will now save its state and exit.

    After this call its exit (code 143, 130 or 0) is neither a failure nor the end of the job, whether this agent
    requested the stop or another node's agent. Call it from any thread; it waits for a busy agent, a second at most.
    """
    _open_link().send(_line(event="stopped", step=step), _SURELY_S)


def refuse(reason: str) -> None:
    """Report that this program cannot do what is requested, and that no restart can change that.

    Then exit with a code other than 0, or raise an exception with this text: the job ends, and its report has `reason`,
    so Python prints no traceback of it. Without this call an exit code of 2 means the same only before the program has
    made its process group. It waits for a busy agent, a second at most.
    """
    if _open_link().refuse(reason[:_REASON_CHARS_MAX]):
        sys.excepthook = functools.partial(_print_unless, reason, sys.excepthook)


def listen(
    on_stop: Callable[[str], None] | None = None,
    on_peer_failed: Callable[[int], None] | None = None,
    *,
    rescue: Callable[[int], int] | None = None,
) -> Listener:
    """Let the agent request a stop by a callback instead of SIGTERM. Callbacks run in one daemon thread.

    `on_stop(reason)` must make all ranks stop after the same step (`should_stop` does that), call `stopped` and exit
    with code 143. `reason` is "join" (nodes join, training continues immediately), "leave" (this or another node
    leaves) or "interrupt" (the job ends); a second reason may follow. `on_peer_failed(generation)` must save what only
    this process holds, and call `saved`: the group is broken, and the main thread may be stuck in a collective for
    minutes. Without `on_peer_failed` the process gets SIGTERM after a peer's failure.

    `rescue(generation)` is for independent parts of a program: each saves its own state and returns the step. All of
    them run before any `on_peer_failed`. Without an `on_peer_failed`, the lowest step is sent; a `rescue` that raises
    counts as step 0. Close the returned listener to unregister its callbacks.
    """
    return _open_link().listen(Listener(_open_link(), on_stop, on_peer_failed, rescue))


def should_stop(every: int = 1) -> bool:
    """Whether all ranks must stop now. True on every rank at the same step, once any rank's agent has requested it.

    Collective: every rank calls it once a step, with the same `every` and in one thread. At each `every`-th call the
    ranks agree, over TCP connections of their own that the first such call makes. Without a process group this process
    decides alone. When it returns True it has called `stopped`: save the state, and exit with code 143.
    """
    return _boundary().should_stop(every)


def _line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass(eq=False)
class Listener:
    """Registered callbacks, until `close` or the end of a `with` block; made by `listen`."""

    link: _Link
    on_stop: Callable[[str], None] | None
    on_peer_failed: Callable[[int], None] | None
    rescue: Callable[[int], int] | None

    def close(self) -> None:
        """Stop listening. If no other listener is left, the agent sends a signal from now on."""
        self.link.forget(self)

    def drop(self) -> None:
        """Stop listening because an exception ends the program. A signal from the agent would hide that exception.

        So the agent is notified only if it requests a stop again.
        """
        self.link.forget(self, notifies=False)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Link:
    """One end of a stream socket, or no socket at all. Each line is sent whole or dropped.

    `step` is the newest step that was passed to `send_step`, sent or not.
    """

    def __init__(self, end: socket.socket | None) -> None:
        self.step = -1
        self._end = end
        self._listeners: list[Listener] = []
        # Whether the group has failed and every `rescue` has returned.
        self._is_rescued = False
        self._lock = threading.Lock()
        self._rest = b""
        self._next_s = 0.0
        self._sent_step = -1
        self._thread: threading.Thread | None = None

    def send_step(self, step: int, now_s: float, total: int = 0) -> None:
        self.step = step
        if now_s >= self._next_s:
            self._next_s = now_s + _PAUSE_S
            # The agent reads steps once a second, so the first one carries the time at which it was complete.
            when = {"monotonic_s": round(now_s, 6)} if self._sent_step < 0 else {}
            self._sent_step = step
            self.send(_line(event="progress", step=step, **when, **({"total": total} if total > 0 else {})))

    def send_last_step(self) -> None:
        """At the end of the program: a failure is reported with the step after which it came."""
        if self.step != self._sent_step:
            self._sent_step = self.step
            self.send(_line(event="progress", step=self.step))

    def send(self, line: bytes, wait_s: float = 0.0) -> None:
        """Send the line; wait up to `wait_s` while the agent does not read. With 0 the line may be dropped."""
        end_s = time.monotonic() + wait_s
        # With a limit: this may be a signal handler in the thread that holds the lock.
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            # The rest of a partly sent line goes first, or the agent would read two lines as one.
            if not wait_s and not self._push():
                return
            self._rest += line
            while not self._push() and self._end is not None and time.monotonic() < end_s:
                poll = select.poll()
                poll.register(self._end, select.POLLOUT)
                poll.poll(max(1.0, 1000 * (end_s - time.monotonic())))
        finally:
            self._lock.release()

    def listen(self, listener: Listener) -> Listener:
        """Report which messages have a listener, and receive them from now on."""
        self._listeners.append(listener)
        self._report_listeners()
        if self._thread is None and self._end is not None:
            self._thread = threading.Thread(target=self._receive, name="elaunch-link", daemon=True)
            self._thread.start()
        return listener

    def forget(self, listener: Listener, *, notifies: bool = True) -> None:
        """Remove a listener. The thread continues: it still responds to what the agent sent before this."""
        if listener not in self._listeners:
            return
        self._listeners.remove(listener)
        if notifies:
            self._report_listeners()

    def send_saved(self, step: int) -> None:
        """The script has saved its state. Dropped while a `rescue` still runs: the script is called again after it."""
        if self._is_rescued or not any(listener.rescue for listener in self._listeners):
            self.send(_line(event="saved", step=step), _SURELY_S)

    def refuse(self, reason: str) -> bool:
        """Send the reason. Returns whether there is an agent."""
        self.send(_line(event="refused", reason=reason), _SURELY_S)
        return self._end is not None

    def close(self) -> None:
        """In a forked child: the link belongs to the parent, and so does the thread that may hold the lock."""
        self._lock = threading.Lock()
        if self._end is not None:
            with contextlib.suppress(OSError):
                self._end.close()
        self._end = None

    def _push(self) -> bool:
        """Send as much of `_rest` as fits. Returns whether all of it is sent."""
        if not self._rest or self._end is None:
            self._rest = b""
            return self._end is not None
        try:
            sent = self._end.send(self._rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            # The socket stays open: the listening thread reads from it and notices the error too.
            self._rest = b""
            return False
        self._rest = self._rest[sent:]
        return not self._rest

    def _report_listeners(self) -> None:
        if self._end is not None:
            stop = any(listener.on_stop for listener in self._listeners)
            peer_failed = any(listener.on_peer_failed or listener.rescue for listener in self._listeners)
            self.send(_line(event="listens", stop=stop, peer_failed=peer_failed), _SURELY_S)

    def _receive(self) -> None:
        """The thread of `listen`; it ends when the agent closes the link."""
        for message in self._messages():
            match message:
                case {"event": "stop_at_step_boundary", "reason": str(reason)}:
                    self._stop(reason)
                case {"event": "peer_failed", "generation": int(generation)}:
                    self._peer_failed(generation)
                case {"event": "stacks"}:
                    text = f"elaunch: what this worker's threads are doing\n{stacks_text()}"
                    os.write(_STDERR, text.encode(errors="backslashreplace"))

    def _stop(self, reason: str) -> None:
        callbacks = [listener.on_stop for listener in [*self._listeners] if listener.on_stop]
        for on_stop in callbacks:
            _tried(on_stop, reason)
        if not callbacks:
            # The listener was dropped, but the program still runs. It must get the signal instead.
            self._report_listeners()

    def _peer_failed(self, generation: int) -> None:
        listeners = [*self._listeners]
        steps = [_tried(listener.rescue, generation) for listener in listeners if listener.rescue]
        self._is_rescued = True
        scripts = [listener.on_peer_failed for listener in listeners if listener.on_peer_failed]
        for on_peer_failed in scripts:
            _tried(on_peer_failed, generation)
        if not scripts:
            # A process whose listeners are closed has nothing left to save. A rescue that failed has saved nothing, and
            # the agent must not wait for it.
            self.send_saved(min((step or 0 for step in steps), default=max(self.step, 0)))

    def _messages(self) -> Iterator[dict[str, Any]]:
        assert self._end is not None
        # Unbuffered: a buffer's lock, held by a daemon thread, is fatal at the interpreter's shutdown.
        with contextlib.suppress(OSError), open(self._end.fileno(), "rb", buffering=0, closefd=False) as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    message = parse_json(line)
                    if isinstance(message, dict):
                        yield message


class _Boundary:
    """The state of `should_stop` between two calls."""

    def __init__(self) -> None:
        self._calls = 0
        self._is_requested = False
        self._is_reached = False
        # The process group of the ranks: a program may destroy it and make another.
        self._world: Any = None
        self._peers: Any = None
        listen(on_stop=self._request)

    def should_stop(self, every: int) -> bool:
        self._calls += 1
        if not self._is_reached and self._calls % every == 0 and self._any_requested():
            self._is_reached = True
            stopped(_open_link().step)
        return self._is_reached

    def _request(self, reason: str) -> None:
        self._is_requested = True

    def _any_requested(self) -> bool:
        dist: Any = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return self._is_requested
        if self._world is not dist.group.WORLD:
            from elaunch.trainer.ranks.peers import Peers

            self._world, self._peers = dist.group.WORLD, Peers().apart("should_stop")
        return bool(self._peers.all_reduce_max([int(self._is_requested)])[0])


def _print_unless(reason: str, hook: Callable[..., object], kind: type, error: BaseException, where: Any) -> None:
    """For `sys.excepthook`: `hook`, but not for an exception that the agent reports."""
    if str(error) != reason:
        hook(kind, error, where)


def _tried(callback: Callable[[Any], Any], message: Any) -> Any:
    """The callback's result. An error is printed, not raised: the next callback may be the one that saves the state."""
    try:
        return callback(message)
    except Exception:
        traceback.print_exc()
        return None


@functools.cache
def _open_link() -> _Link:
    # The variable is removed: in a program that this process starts, the number would mean nothing.
    link = _Link(_inherited(os.environ.pop("ELAUNCH_LINK", "")))
    os.register_at_fork(after_in_child=link.close)
    # Before atexit's calls, since by then the agent has been notified that the program is over, and reads no more.
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    with contextlib.suppress(RuntimeError):
        register(link.send_last_step)
    return link


@functools.cache
def _boundary() -> _Boundary:
    return _Boundary()


def _inherited(number: str) -> socket.socket | None:
    """The socket with that descriptor number, set to close on exec; None if there is no such socket."""
    try:
        end = socket.socket(fileno=int(number))
    except (ValueError, OSError):
        return None
    if end.family != socket.AF_UNIX or end.type != socket.SOCK_STREAM:
        end.detach()
        return None
    end.set_inheritable(False)
    return end
