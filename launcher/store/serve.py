"""The job's own store: a server process beside the head's agent, which ends with it; and `elaunch store`.

There is only one server: the port is the lock. A node that finds the port taken is a client of what listens there.
"""

from __future__ import annotations

import errno
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, addresses, owner_of, routable_addresses, socket_address
from elaunch.launcher.options.command_line import Command, Option
from elaunch.launcher.options.values import listen_address
from elaunch.launcher.preflight import read_secret
from elaunch.launcher.store.locate import ETCD_PORT, RendezvousPlan
from elaunch.launcher.store.token import STORES, TOKEN_LINE, store_token
from elaunch.rendezvous.endpoint import Endpoint, is_address, is_loopback, is_meant_locally, is_unspecified
from elaunch.rendezvous.secret import Secret, new_token

# A store that is not up after this time has failed.
START_S = 30.0
_STOP_S = 5.0
_BACKLOG = 1024
_EVERYWHERE = "0.0.0.0"
_LISTEN = "its address; without HOST all addresses of this host [port 2379]"
_listen_address = partial(listen_address, default=_EVERYWHERE)
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The folder of elaunch comes last in `sys.path`. The job's folder is not in it: a user's `ssl.py` must not be imported.
_START = (
    "import runpy, sys; root, title = sys.argv[1:3]; del sys.argv[1:3]; "
    "sys.path = [*(p for p in sys.path if p), root]; "
    "from elaunch.agent.linux import set_command_line; set_command_line((title,), 'elaunch-rdzv')\n"
    "from elaunch.launcher.store.token import token_removed_at_exit\n"
    "with token_removed_at_exit(): runpy.run_module('elaunch.rendezvous.server', run_name='__main__', alter_sys=True)"
)


class StoreProcess:
    """The store's server: a child process that ends with this process, at the latest when the kernel closes its stdin.

    `token` is the secret that its clients need. With `save_for`, the store's endpoint, the token is stored for this
    user's other agents in `token_file`, or `problem` is why it is not.
    """

    def __init__(self, listener: socket.socket, title: str, token: str, agents: int, save_for: Endpoint | None) -> None:
        root, fd = str(Path(__file__).parents[3]), listener.fileno()
        environ = {name: value for name, value in os.environ.items() if name != "ELAUNCH_TOKEN"}
        self.token = token
        self.token_file = self.problem = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, root, title, "--fd", str(fd), "--agents", str(agents)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(fd,),
            # Ctrl-C must not reach the server: the agent needs its store until the job has ended.
            start_new_session=True,
            cwd="/",
        )
        assert self.process.stdin
        if save_for:
            # The server starts meanwhile, and serves no client before it has the token.
            try:
                self.token_file = store_token(token, save_for)
            except (OSError, RuntimeError) as error:
                self.problem = getattr(error, "strerror", None) or str(error)
        # A pipe's capacity is larger than any token.
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{self.token_file}\n{token}\n".encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        """End the server, which removes the token's file."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve_if_head(plan: RendezvousPlan, log: Callable[[str], None], agents: int = 1) -> StoreProcess | None:
    """Start the job's store if this node is the head and nothing listens at the endpoint; else return None.

    `agents` is the largest number of the job's nodes. Raises UsageError if the store cannot be served as requested, and
    SiteError if its server does not start.
    """
    if not plan.serves or not decide_head(plan, log):
        return None
    endpoint = plan.endpoints[0]
    listener = listen(endpoint)
    return serve(listener, endpoint, plan.token, agents) if listener else None


def serve(listener: socket.socket, endpoint: Endpoint, token: str, agents: int = 0) -> StoreProcess:
    """Start the server on `listener`, which is closed in this process.

    An empty `token` means a new token, which is stored in a file. `agents` is the number of agents that will connect,
    0 if it is not known.
    """
    save_for = None if token else endpoint
    token = token or new_token()
    with listener:
        try:
            Secret(token)
        except ValueError as error:
            raise UsageError(str(error)) from None
        process = StoreProcess(listener, f"elaunch: job store {endpoint}", token, agents, save_for)
    assert process.process.stdout
    ready, _, _ = select.select([process.process.stdout], [], [], START_S)
    # The server writes its line in one write, or ends without it.
    if not (ready and os.read(process.process.stdout.fileno(), 64)):
        process.stop()
        raise SiteError(f"the job's store did not start at {endpoint}; its server's message is above")
    return process


def listen(endpoint: Endpoint, *, exactly: bool = False) -> socket.socket | None:
    """A socket that listens at `endpoint` on this host; None if another program listens there already.

    It listens on one address if the host is an address, or a name with one address that other nodes can reach. For any
    other name the other nodes may know other addresses than this host does, so it listens on all addresses, as for
    0.0.0.0. With `exactly`, a host that is not this one is a UsageError. Without it the host may be a load balancer's,
    and the socket listens on all addresses.
    """
    try:
        found = addresses(endpoint.host)
    except NoAddress as error:
        if exactly:
            raise UsageError(f"nothing can be served at {endpoint}: {error}") from None
        found = []
    is_exact = is_address(endpoint.host) or is_meant_locally(endpoint.host)
    is_one = len(found) == 1 and not is_loopback(found[0])
    address = found[0] if found and (is_exact or is_one) and not is_unspecified(found[0]) else ""
    try:
        return _listener(address, endpoint.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        if address and not exactly and error.errno == errno.EADDRNOTAVAIL:
            return listen(Endpoint(_EVERYWHERE, endpoint.port))
        # Not error.strerror: create_server adds its arguments to it.
        why = os.strerror(error.errno) if error.errno else error
        raise UsageError(f"nothing can be served at {endpoint}: {why}; choose another endpoint") from None


def _listener(address: str, port: int) -> socket.socket:
    """A socket that listens on one address, or on all if it is empty. Raises OSError."""
    if address:
        family, sockaddr = socket_address(address, port)
        place = sockaddr[:2] if family == socket.AF_INET else sockaddr
        return socket.create_server(place, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def decide_head(plan: RendezvousPlan, log: Callable[[str], None]) -> bool:
    """Decide whether this node is the head: by the plan, or since the endpoint is an address of this host.

    Logs a line if the endpoint's name means several hosts, which makes none of them the head.
    """
    if plan.is_head is not None:
        return plan.is_head
    host = plan.endpoints[0].host
    try:
        found = owner_of(host)
    except NoAddress:
        return False
    if found is Owner.SEVERAL_HOSTS:
        log(
            f"{host} is the name of several hosts, so none of them serves the store; add --rdzv-conf is_host=1 on one"
            " of them, or use a name of one host in the endpoint"
        )
    return found is Owner.THIS_HOST


def how_to_join(
    argv: Sequence[str], endpoint: Endpoint, served: StoreProcess | None, *, is_terminal: bool
) -> tuple[str, ...]:
    """The command line with these arguments for another host, and a line about the file of the token that it names.

    `served` has made the token; it is None if the user knows the token already. The token is shown on a terminal only,
    because many people may read a log. Raises UsageError if no one could learn it.
    """
    token = file = ""
    if served:
        # Only agents on this host can reach a loopback endpoint, and they find the file.
        is_found = bool(served.token_file) and is_meant_locally(endpoint.host)
        if not (is_terminal or served.token_file):
            raise UsageError(
                "no one could learn the token of the store that this host was to serve: stderr is not a terminal, and"
                f" no file can be written in {STORES} ({served.problem}); give all nodes the same token: {TOKEN_LINE}"
            )
        token = served.token if is_terminal and not is_found else ""
        file = "" if is_terminal or is_found else served.token_file
    line = shlex.join(["elaunch", *(["--token-file", file] if file else []), *argv])
    if not file:
        return (f"ELAUNCH_TOKEN={shlex.quote(token)} {line}" if token else line,)
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return (
        line,
        f"the store's token is in {file}, which only you can read: nodes that share this home find it there; on another"
        f" node copy it first ({shlex.join(['scp', f'{host}:{file}', 'token'])}), and type --token-file token",
    )


def _main(ctx: click.Context) -> int:
    """Serve until a signal arrives. Returns the exit code. Raises UsageError and SiteError."""
    file = ctx.params["token_file"]
    token = read_secret(file) if file else ctx.obj.environ.get("ELAUNCH_TOKEN", "").strip()
    endpoint = Endpoint(*ctx.params["listen"])
    listener = listen(endpoint, exactly=True)
    if listener is None:
        raise UsageError(f"another program listens at {endpoint} already; choose another port with --listen HOST:PORT")
    is_everywhere = endpoint.host in (_EVERYWHERE, "::")
    host = (routable_addresses() or ["localhost"])[0] if is_everywhere else endpoint.host
    served_at = Endpoint(host, listener.getsockname()[1])
    server = serve(listener, served_at, token)
    try:
        # Blocked, so that they interrupt nothing. One that is ignored (nohup) stays ignored: `sigwait` would return it.
        ends = [signum for signum in _ENDS if signal.getsignal(signum) is not signal.SIG_IGN]
        signal.pthread_sigmask(signal.SIG_BLOCK, (*ends, signal.SIGCHLD))
        for line in announcement(served_at, None if token else server, is_terminal=os.isatty(2)):
            print(f"elaunch: {line}", file=sys.stderr, flush=True)
        while (code := server.process.poll()) is None:
            signum = signal.sigwait((*ends, signal.SIGCHLD))
            if signum in ends:
                print(f"elaunch: the store exits on {signal.Signals(signum).name}", file=sys.stderr)
                return 0
        raise SiteError(f"the store's server exited unexpectedly, with exit code {code}")
    finally:
        server.stop()


COMMAND = Command(
    "store",
    _main,
    [
        Option("listen", "HOST:PORT", _LISTEN, _listen_address, default=(_EVERYWHERE, ETCD_PORT)),
        Option("token-file", "FILE", "holds the token that every job must know [ELAUNCH_TOKEN, else a new token]"),
    ],
    usage=["[--listen HOST:PORT] [--token-file FILE]"],
    about="Serve a store for jobs of several nodes until Ctrl-C. Jobs that share it need different --run-ids.",
    ending="""The store is in this host's memory: it ends with the host, and then all its jobs end.
A store that is started again is empty. An etcd cluster outlives a host:
--rdzv-endpoint a:2379,b:2379,c:2379.""",
)


def announcement(endpoint: Endpoint, served: StoreProcess | None, *, is_terminal: bool) -> tuple[str, ...]:
    """What the user must know: the line to type, and the limits of this store.

    `served` is None if the user gave the token, which is then not shown. Raises UsageError if no one could learn it.
    """
    argv = ["--nnodes", "2", "--rdzv-endpoint", str(endpoint), "--run-id", "NAME", "train.py"]
    line, *hints = how_to_join(argv, endpoint, served, is_terminal=is_terminal)
    same = "" if served else "   (with ELAUNCH_TOKEN set to the same token)"
    return (
        f"serving a store at {endpoint}; on every node of a job type: {line}{same}",
        *hints,
        "the store is in this host's memory: jobs end when it ends, and a store that is started again is empty;"
        " an etcd cluster outlives any host. Ctrl-C ends the store",
    )
