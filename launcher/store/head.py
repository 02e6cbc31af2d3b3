"""The job's own store: a server process beside the head's agent, which ends with it.

Two servers cannot be: the port is the lock, and whoever finds it taken is a client of what listens there.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.network.reach import NoAddress, Whose, addresses, is_address, is_loopback, is_meant_locally, whose
from elaunch.launcher.store.keyring import Kept
from elaunch.launcher.store.open_files import check_descriptors
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.secret import Secret, new_token

_START_S = 30.0
_STOP_S = 5.0
_BACKLOG = 1024

# The folder of elaunch comes last, and that of the job not at all: a user's `ssl.py` is not ours.
_START = (
    "import runpy, sys; root, title, module = sys.argv[1:4]; del sys.argv[1:4]; "
    "sys.path = [*(p for p in sys.path if p), root]; "
    "from elaunch.agent.linux import set_command_line; set_command_line((title,), 'elaunch-rdzv')\n"
    "from elaunch.launcher.store.keyring import forgotten_at_the_end\n"
    "with forgotten_at_the_end(): runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


class StoreProcess:
    """The store's server: a child that ends with this process, at the latest when the kernel closes its stdin.

    `title` is what `ps` shows of it, `token` the secret that its clients need. With `keep_for`, the
    store's endpoint, the token is kept in a file for this user's other agents: `kept` names the file, or `trouble` says
    why there is none. `folder` is removed at the end if the server has not removed it.
    """

    def __init__(
        self,
        module: str,
        title: str,
        args: tuple[str, ...],
        token: str,
        fds: tuple[int, ...] = (),
        folder: str | None = None,
        keep_for: Endpoint | None = None,
    ) -> None:
        root = str(Path(__file__).parents[3])
        environ = {name: value for name, value in os.environ.items() if name != "ELAUNCH_TOKEN"}
        self.token = token
        self.trouble = ""
        self._folder = folder
        self._kept: Kept | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, root, title, module, *args],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            # A Ctrl-C is for the agent, which needs its store until the job has ended.
            start_new_session=True,
            cwd="/",
        )
        assert self._process.stdin
        if keep_for:
            # The server is starting meanwhile. It answers nobody before it has the token.
            try:
                self._kept = Kept(token, keep_for)
            except OSError as error:
                self.trouble = error.strerror or str(error)
        # A pipe's room is larger than any token.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{self.kept}\n{token}\n".encode())
            self._process.stdin.flush()

    @property
    def kept(self) -> str:
        """The file with the token, or empty."""
        return self._kept.path if self._kept else ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, deadline_s: float = _START_S) -> bool:
        """Whether it serves; False where it has ended instead, or does not come to it in time."""
        assert self._process.stdout
        fd = self._process.stdout.fileno()
        said, end_s = b"", time.monotonic() + deadline_s
        while b"\n" not in said:
            if not select.select([fd], [], [], max(end_s - time.monotonic(), 0))[0]:
                return False
            piece = os.read(fd, 64)
            if not piece:
                return False
            said += piece
        return True

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End it."""
        if self._kept:
            self._kept.remove()
            self._kept = None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class Bound:
    """A socket that listens, and the address that it was bound to; `everywhere` says that it is all addresses."""

    listener: socket.socket
    everywhere: bool


def take_the_head(
    plan: RendezvousPlan, say: Callable[[str], None], nodes: tuple[int, int] = (1, 1)
) -> StoreProcess | None:
    """Serve the job's store, where the plan says so and nothing listens at the endpoint; else None.

    `nodes` are the least and the largest number of the job's nodes. Raises UsageError if the store cannot be served as
    asked, SiteError if its server does not start.
    """
    if plan.serving is Serving.NOTHING or not is_the_head(plan, say):
        return None
    endpoint = plan.endpoints[0]
    bound = listen(endpoint)
    if bound is None:
        return None
    if plan.serving is Serving.MEMORY:
        try:
            check_descriptors(nodes, say)
        except UsageError:
            bound.listener.close()
            raise
    return serve(bound, plan.serving, endpoint, plan.token, nodes[1])


def serve(bound: Bound, serving: Serving, endpoint: Endpoint, token: str, agents: int = 0) -> StoreProcess:
    """Start the server on `bound`, which is closed here.

    An empty `token` means a new one, which is kept in a file. `agents` is 0 if nobody knows how many come.
    """
    keep_for = None if token else endpoint
    token = token or new_token()
    title = f"elaunch: job store {endpoint}"
    with bound.listener as listener:
        try:
            Secret(token)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if serving is Serving.ETCD:
            etcd = shutil.which("etcd")
            if etcd is None:
                raise UsageError("--store etcd finds no etcd on the PATH; install one, or leave --store out")
            place = Endpoint("::" if bound.everywhere else listener.getsockname()[0], listener.getsockname()[1])
            # It can take no socket over; where somebody else is faster, it ends and says so.
            listener.close()
            folder = tempfile.mkdtemp(prefix="elaunch-etcd-")
            args = (str(Path(etcd).absolute()), str(place), folder)
            process = StoreProcess(
                "elaunch.launcher.store.etcd_process", title, args, token, folder=folder, keep_for=keep_for
            )
        else:
            fd = listener.fileno()
            process = StoreProcess(
                "elaunch.rendezvous.server",
                title,
                ("--fd", str(fd), "--agents", str(agents)),
                token,
                (fd,),
                keep_for=keep_for,
            )
    if not process.wait_until_ready():
        process.stop()
        raise SiteError(f"the job's store could not be started at {endpoint}; what its server says is above")
    return process


def listen(endpoint: Endpoint, *, exactly: bool = False) -> Bound | None:
    """A socket that listens at `endpoint` on this host; None where somebody listens there already.

    An address is taken as it is, and so is a name with one address that others can reach. Of any other name the
    others may know other addresses than this host does: then it is all of them. With `exactly` a host that is not
    this one is a UsageError; else the caller knows better, as behind a balancer, and again it is all addresses.
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
            return Bound(_listener(found[0], endpoint.port), everywhere=False)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if exactly or error.errno != errno.EADDRNOTAVAIL:
                raise UsageError(f"nothing can be served at {endpoint}: {_why(error)}; choose another place") from None
    return listen_everywhere(endpoint.port)


def listen_everywhere(port: int) -> Bound | None:
    """A socket that listens at `port` of all addresses; None where somebody listens there already."""
    try:
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(f"nothing can be served at port {port}: {_why(error)}; choose another one") from None
    return Bound(listener, everywhere=True)


def _listener(address: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return socket.create_server(place[:2] if family == socket.AF_INET else place, family=family, backlog=_BACKLOG)


def _why(error: OSError) -> str:
    # Not strerror: create_server tells its arguments in there.
    return os.strerror(error.errno) if error.errno else str(error)


def is_the_head(plan: RendezvousPlan, say: Callable[[str], None]) -> bool:
    """Whether this node serves the job's store: the plan says so, or the endpoint is this host's."""
    if plan.is_head is not None:
        return plan.is_head
    host = plan.endpoints[0].host
    try:
        found = whose(host)
    except NoAddress:
        return False
    if found is Whose.SEVERAL:
        say(
            f"{host} means several hosts, and none of them serves the store by itself; add --rdzv-conf is_host=1 on"
            " one, or give the endpoint by a name of one host"
        )
    return found is Whose.OURS
