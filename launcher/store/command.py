"""`elaunch store`: the served store in the foreground, for a small team without an etcd."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import routable_addresses
from elaunch.launcher.options.command_line import Command, own
from elaunch.launcher.options.files import read_secret
from elaunch.launcher.options.values import listen_address
from elaunch.launcher.store.connect import how_to_join
from elaunch.launcher.store.locate import ETCD_PORT
from elaunch.launcher.store.serve import StoreProcess, listen, listen_everywhere, serve
from elaunch.rendezvous.endpoint import Endpoint

_LISTEN = "its address; without HOST all addresses of this host [port 2379]"
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _main(ctx: click.Context) -> int:
    """Serve until a signal comes. Returns the exit code. Raises UsageError and SiteError."""
    file = ctx.params["token_file"]
    token = read_secret(file) if file else ctx.obj.environ.get("ELAUNCH_TOKEN", "").strip()
    host, port = ctx.params["listen"]
    endpoint = Endpoint(host, port) if host not in ("", "0.0.0.0", "::") else None
    listener = listen(endpoint, exactly=True) if endpoint else listen_everywhere(port)
    if listener is None:
        where = endpoint or f"port {port}"
        raise UsageError(f"another program listens at {where} already; choose another port with --listen HOST:PORT")
    host = host if endpoint else (routable_addresses() or ["localhost"])[0]
    place = Endpoint(host, listener.getsockname()[1])
    server = serve(listener, place, token)
    try:
        ends = _take_signals()
        for line in announcement(place, None if token else server, is_terminal=os.isatty(2)):
            print(f"elaunch: {line}", file=sys.stderr, flush=True)
        return _wait(server, ends)
    finally:
        server.stop()


COMMAND = Command(
    "store",
    _main,
    [
        own("listen", "HOST:PORT", _LISTEN, listen_address(""), default=("", ETCD_PORT)),
        own("token-file", "FILE", "holds the token that every job must know [ELAUNCH_TOKEN, else a new token]"),
    ],
    usage=["[--listen HOST:PORT] [--token-file FILE]"],
    about="Serve a store for jobs of several nodes until Ctrl-C. Jobs that share it need different --run-ids.",
    ending="""The store is in this host's memory: it ends with the host, and then all its jobs end.
A store that is started again is empty. An etcd cluster outlives a host:
--rdzv-endpoint a:2379,b:2379,c:2379.""",
)


def announcement(place: Endpoint, served: StoreProcess | None, *, is_terminal: bool) -> tuple[str, ...]:
    """What the user must know: the line to type, and the limits of this store.

    `served` is None if the user gave the token, which is then not shown. Raises UsageError if nobody could learn it.
    """
    words = ["--nnodes", "2", "--rdzv-endpoint", str(place), "--run-id", "NAME", "train.py"]
    line, *hints = how_to_join(words, place, served, is_terminal=is_terminal)
    same = "" if served else "   (with ELAUNCH_TOKEN set to the same token)"
    return (
        f"serving a store at {place}; on every node of a job type: {line}{same}",
        *hints,
        "the store is in this host's memory: jobs end when it ends, and a store that is started again is empty;"
        " an etcd cluster outlives any host. Ctrl-C ends the store",
    )


def _take_signals() -> tuple[signal.Signals, ...]:
    """Block the signals that end the store, so that they interrupt nothing, and return them for `sigwait`.

    A signal that is ignored (nohup) stays ignored: if it were blocked, `sigwait` would return it.
    """
    ends = tuple(signum for signum in _ENDS if signal.getsignal(signum) is not signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (*ends, signal.SIGCHLD))
    return ends


def _wait(server: StoreProcess, ends: Sequence[signal.Signals]) -> int:
    while server.exit_code() is None:
        signum = signal.sigwait((*ends, signal.SIGCHLD))
        if signum in ends:
            print(f"elaunch: the store ends, because of {signal.Signals(signum).name}", file=sys.stderr)
            return 0
    raise SiteError(f"the store's server ended by itself, with exit code {server.exit_code()}")
