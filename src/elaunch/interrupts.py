"""Ctrl-C while a command of elaunch imports: there is nothing to stop yet but the process itself."""

from __future__ import annotations

# `signal` imports much, and Ctrl-C may come meanwhile.
import _signal  # type: ignore[import-not-found]
import os


def end_at_ctrl_c() -> None:
    """End this process at Ctrl-C with exit code 130, without a traceback.

    This includes a process that a script has started with `&`, for which the shell ignores SIGINT and SIGQUIT: torchrun
    and its workers ignore neither them nor SIGTERM. Other ignored signals (nohup, trap '' USR1) stay ignored.
    """
    for signum in (_signal.SIGQUIT, _signal.SIGTERM):
        if _signal.getsignal(signum) == _signal.SIG_IGN:
            _signal.signal(signum, _signal.SIG_DFL)
    if _signal.getsignal(_signal.SIGINT) in (_signal.default_int_handler, _signal.SIG_IGN):
        _signal.signal(_signal.SIGINT, _end)
    # `hosts.node` has blocked it while Python starts.
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGINT,))


def raise_at_ctrl_c() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, after `end_at_ctrl_c`."""
    if _signal.getsignal(_signal.SIGINT) is _end:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _end(*_: object) -> None:
    os._exit(130)
