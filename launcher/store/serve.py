"""The job's own store: a server process beside the head's agent, which ends with it.

There is only one server: the port is the lock. A node that finds the port taken is a client of what listens there.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, addresses, owner_of
from elaunch.launcher.store.locate import RendezvousPlan
from elaunch.launcher.store.token import keep_token
from elaunch.rendezvous.endpoint import Endpoint, is_address, is_loopback, is_meant_locally
from elaunch.rendezvous.secret import Secret, new_token

# A store that is not up after this time has failed.
START_S = 30.0
_STOP_S = 5.0
_BACKLOG = 1024

# The folder of elaunch comes last in the path. The job's folder is not in it: a user's `ssl.py` must not be imported.
_START = (
    "import runpy, sys; root, title = sys.argv[1:3]; del sys.argv[1:3]; "
    "sys.path = [*(p for p in sys.path if p), root]; "
    "from elaunch.agent.linux import set_command_line; set_command_line((title,), 'elaunch-rdzv')\n"
    "from elaunch.launcher.store.token import token_removed_at_exit\n"
    "with token_removed_at_exit(): runpy.run_module('elaunch.rendezvous.server', run_name='__main__', alter_sys=True)"
)


class StoreProcess:
    """The store's server: a child process that ends with this process, at the latest when the kernel closes its stdin.

    `token` is the secret that its clients need. With `keep_for`, the store's endpoint, the token is kept in a file for
    this user's other agents: `kept` names the file, or `trouble` says why there is none.
    """

    def __init__(self, listener: socket.socket, title: str, token: str, agents: int, keep_for: Endpoint | None) -> None:
        root, fd = str(Path(__file__).parents[3]), listener.fileno()
        environ = {name: value for name, value in os.environ.items() if name != "ELAUNCH_TOKEN"}
        self.token = token
        self.kept = self.trouble = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, root, title, "--fd", str(fd), "--agents", str(agents)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(fd,),
            # Ctrl-C must not reach the server: the agent needs its store until the job has ended.
            start_new_session=True,
            cwd="/",
        )
        assert self._process.stdin
        if keep_for:
            # The server starts meanwhile. It answers no client before it has the token.
            try:
                self.kept = keep_token(token, keep_for)
            except (OSError, RuntimeError) as error:
                self.trouble = getattr(error, "strerror", None) or str(error)
        # A pipe's capacity is larger than any token.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{self.kept}\n{token}\n".encode())
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, deadline_s: float = START_S) -> bool:
        """True when the server serves; False if it has ended, or is not ready within `deadline_s` seconds."""
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        # The server writes its line at once, or nothing.
        return bool(ready and os.read(self._process.stdout.fileno(), 64))

    def exit_code(self) -> int | None:
        """The server's exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the server, which removes the token's file."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve_if_head(plan: RendezvousPlan, say: Callable[[str], None], agents: int = 1) -> StoreProcess | None:
    """Start the job's store if this node is the head and nothing listens at the endpoint; else return None.

    `agents` is the largest number of the job's nodes. Raises UsageError if the store cannot be served as asked, and
    SiteError if its server does not start.
    """
    if not plan.serves or not decide_head(plan, say):
        return None
    endpoint = plan.endpoints[0]
    listener = listen(endpoint)
    return serve(listener, endpoint, plan.token, agents) if listener else None


def serve(listener: socket.socket, endpoint: Endpoint, token: str, agents: int = 0) -> StoreProcess:
    """Start the server on `listener`, which is closed in this process.

    An empty `token` means a new token, which is kept in a file. `agents` is the number of agents that will connect,
    0 if it is not known.
    """
    keep_for = None if token else endpoint
    token = token or new_token()
    with listener:
        try:
            Secret(token)
        except ValueError as error:
            raise UsageError(str(error)) from None
        process = StoreProcess(listener, f"elaunch: job store {endpoint}", token, agents, keep_for)
    if not process.wait_until_ready():
        process.stop()
        raise SiteError(f"the job's store did not start at {endpoint}; its server's message is above")
    return process


def listen(endpoint: Endpoint, *, exactly: bool = False) -> socket.socket | None:
    """A socket that listens at `endpoint` on this host; None if another program listens there already.

    It listens on one address if the host is an address, or a name with one address that other nodes can reach. For any
    other name the other nodes may know other addresses than this host does, so it listens on all addresses. With
    `exactly`, a host that is not this one is a UsageError. Without it the host may be that of a balancer, and the
    socket listens on all addresses.
    """
    try:
        found = addresses(endpoint.host)
    except NoAddress as error:
        if exactly:
            raise UsageError(f"nothing can be served at {endpoint}: {error}") from None
        found = []
    is_exact = is_address(endpoint.host) or is_meant_locally(endpoint.host)
    if found and (is_exact or (len(found) == 1 and not is_loopback(found[0]))):
        try:
            return _listener(found[0], endpoint.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if exactly or error.errno != errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"nothing can be served at {endpoint}: {_why(error)}; choose another endpoint"
                ) from None
    return listen_everywhere(endpoint.port)


def listen_everywhere(port: int) -> socket.socket | None:
    """A socket that listens at `port` on all addresses; None if another program listens there already."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(f"nothing can be served at port {port}: {_why(error)}; choose another port") from None


def _listener(address: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return socket.create_server(place[:2] if family == socket.AF_INET else place, family=family, backlog=_BACKLOG)


def _why(error: OSError) -> str:
    # Not error.strerror: create_server adds its arguments to it.
    return os.strerror(error.errno) if error.errno else str(error)


def decide_head(plan: RendezvousPlan, say: Callable[[str], None]) -> bool:
    """Decide whether this node is the head: the plan says so, or the endpoint is an address of this host.

    Tells the user if the endpoint's name means several hosts, which makes none of them the head.
    """
    if plan.is_head is not None:
        return plan.is_head
    host = plan.endpoints[0].host
    try:
        found = owner_of(host)
    except NoAddress:
        return False
    if found is Owner.SEVERAL_HOSTS:
        say(
            f"{host} is the name of several hosts, so none of them serves the store; add --rdzv-conf is_host=1 on one"
            " of them, or use a name of one host in the endpoint"
        )
    return found is Owner.THIS_HOST
