"""The job's own store: a server process beside the head's agent, which ends with it.

There is only one server: the port is the lock. A node that finds the port taken is a client of what listens there.

As a program (`--store etcd`) it runs the job's own etcd and removes all its files at the end. Its arguments are etcd's
path, the endpoint and an empty folder. The token is a line on stdin, whose end ends the process. It prints "ready" when
etcd answers. The certificate that is made from the token is the server's, and etcd accepts no other from a client.
"""

from __future__ import annotations

import errno
import http.client
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elaunch.agent.linux import die_with_parent
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, addresses, owner_of
from elaunch.launcher.options.values import endpoints
from elaunch.launcher.store.locate import RendezvousPlan, Serving
from elaunch.launcher.store.token import KeptToken
from elaunch.rendezvous.endpoint import Endpoint, is_address, is_loopback, is_meant_locally
from elaunch.rendezvous.secret import Secret, new_token
from elaunch.rendezvous.server.admission import agents_for, descriptors_for, slots

# A store that is not up after this time has failed.
START_S = 30.0
_STOP_S = 5.0
_BACKLOG = 1024
_POLL_S = 0.02
_ETCD_STOP_S = 3.0
_LAST_LINES_BYTES = 2048

# The folder of elaunch comes last in the path. The job's folder is not in it: a user's `ssl.py` must not be imported.
_START = (
    "import runpy, sys; root, title, module = sys.argv[1:4]; del sys.argv[1:4]; "
    "sys.path = [*(p for p in sys.path if p), root]; "
    "from elaunch.agent.linux import set_command_line; set_command_line((title,), 'elaunch-rdzv')\n"
    "from elaunch.launcher.store.token import token_removed_at_exit\n"
    "with token_removed_at_exit(): runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


class StoreProcess:
    """The store's server: a child process that ends with this process, at the latest when the kernel closes its stdin.

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
        self._kept: KeptToken | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, root, title, module, *args],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            # Ctrl-C must not reach the server: the agent needs its store until the job has ended.
            start_new_session=True,
            cwd="/",
        )
        assert self._process.stdin
        if keep_for:
            # The server starts meanwhile. It answers no client before it has the token.
            try:
                self._kept = KeptToken(token, keep_for)
            except OSError as error:
                self.trouble = error.strerror or str(error)
        # A pipe's capacity is larger than any token.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{self.kept}\n{token}\n".encode())
            self._process.stdin.flush()

    @property
    def kept(self) -> str:
        """The path of the file with the token, or empty."""
        return self._kept.path if self._kept else ""

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
        """End the server, and remove its files."""
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
    """A socket that listens. `everywhere` is true if it listens on all addresses of this host."""

    listener: socket.socket
    everywhere: bool


def serve_if_head(
    plan: RendezvousPlan, say: Callable[[str], None], nodes: tuple[int, int] = (1, 1)
) -> StoreProcess | None:
    """Start the job's store if this node is the head and nothing listens at the endpoint; else return None.

    `nodes` are the least and the largest number of the job's nodes. Raises UsageError if the store cannot be served as
    asked, and SiteError if its server does not start.
    """
    if plan.serving is Serving.NOTHING or not decide_head(plan, say):
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
    """Start the server on `bound`. The socket is closed in this process.

    An empty `token` means a new token, which is kept in a file. `agents` is the number of agents that will connect,
    0 if it is not known.
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
            # etcd cannot take over a socket. If another program is faster to take the port, etcd ends and says so.
            listener.close()
            folder = tempfile.mkdtemp(prefix="elaunch-etcd-")
            args = (str(Path(etcd).absolute()), str(place), folder)
            process = StoreProcess(__name__, title, args, token, folder=folder, keep_for=keep_for)
        else:
            fd = listener.fileno()
            options = ("--fd", str(fd), "--agents", str(agents))
            process = StoreProcess("elaunch.rendezvous.server", title, options, token, (fd,), keep_for=keep_for)
    if not process.wait_until_ready():
        process.stop()
        raise SiteError(f"the job's store did not start at {endpoint}; its server's message is above")
    return process


def listen(endpoint: Endpoint, *, exactly: bool = False) -> Bound | None:
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
            return Bound(_listener(found[0], endpoint.port), everywhere=False)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if exactly or error.errno != errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"nothing can be served at {endpoint}: {_why(error)}; choose another endpoint"
                ) from None
    return listen_everywhere(endpoint.port)


def listen_everywhere(port: int) -> Bound | None:
    """A socket that listens at `port` on all addresses; None if another program listens there already."""
    try:
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(f"nothing can be served at port {port}: {_why(error)}; choose another port") from None
    return Bound(listener, everywhere=True)


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


def check_descriptors(nodes: tuple[int, int], say: Callable[[str], None]) -> None:
    """Check this host's limit of open files for a store of `nodes`, least and most.

    Call it before the head serves the store. Raises UsageError if the limit is too low for the least.
    """
    least, most = nodes
    limit = hard_limit()
    served = agents_for(slots(limit, most))
    if served >= most:
        return
    few = f"the limit of open files on this host is {limit}, which is enough for a store of {served} nodes"
    way_out = f"raise the hard limit to {descriptors_for(most)} (ulimit -Hn, LimitNOFILE= of systemd), or use an etcd"
    if served < least:
        raise UsageError(f"{few}, but --nnodes asks for {least}; {way_out}: --rdzv-endpoint etcd-host:2379")
    say(f"{few}, but --nnodes allows {most}: connections of further nodes may be refused; {way_out}")


def agents_served() -> int:
    """The number of agents that a store on this host can serve, if the job's size is not known."""
    return agents_for(slots(hard_limit()))


def hard_limit() -> int:
    """The number of files that a process of this user may open at a time on this host."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def main(argv: Sequence[str]) -> int:
    """Run etcd until stdin ends, or etcd ends by itself. Returns the exit code."""
    etcd, place, folder = argv[0], argv[1], Path(argv[2])
    token = sys.stdin.readline().strip()
    if not token:
        # The agent was ended before it could name one.
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    secret = Secret(token)
    # A scheduler signals every process of a job. This process ignores that. etcd cannot be kept from it, and ends.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    try:
        for name, text in (("key.pem", secret.key), ("cert.pem", secret.certificate)):
            # The folder is this user's alone.
            (folder / name).write_text(text)
        process = subprocess.Popen(
            _etcd_command(etcd, place, folder),
            # The user's ETCD_* variables are for another etcd.
            env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        try:
            return _run_etcd(process, secret, place)
        finally:
            process.terminate()
            try:
                process.wait(_ETCD_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _etcd_command(etcd: str, place: str, folder: Path) -> list[str]:
    """etcd's command line: one member, which serves clients at `place`. Its peer port is on loopback only."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        peer = f"https://127.0.0.1:{probe.getsockname()[1]}"
    flags = {
        "name": "elaunch",
        "data-dir": folder / "data",
        "listen-client-urls": f"https://{place}",
        "advertise-client-urls": f"https://{place}",
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"elaunch={peer}",
        # One member elects itself: the default times only make its start slower.
        "heartbeat-interval": 10,
        "election-timeout": 50,
        "logger": "zap",
        "log-level": "error",
        "enable-grpc-gateway": "true",
    }
    for side in ("", "peer-"):
        flags |= {f"{side}cert-file": folder / "cert.pem", f"{side}key-file": folder / "key.pem"}
        flags |= {f"{side}trusted-ca-file": folder / "cert.pem", f"{side}client-cert-auth": "true"}
    return [etcd, *(f"--{name}={value}" for name, value in flags.items())]


def _run_etcd(process: subprocess.Popen[bytes], secret: Secret, place: str) -> int:
    """Print "ready" when etcd answers, then wait until stdin or etcd ends. If etcd ends, show its last output."""
    assert process.stderr
    log = process.stderr.fileno()
    is_ready, output, sources = False, b"", [0, log]
    while log in sources:
        if not is_ready and _answers(secret, place):
            is_ready = True
            with suppress(BrokenPipeError):
                os.write(1, b"ready\n")
        readable, _, _ = select.select(sources, [], [], None if is_ready else _POLL_S)
        if 0 in readable and not os.read(0, 4096):
            return 0
        if log in readable:
            piece = os.read(log, 65536)
            output = (output + piece)[-_LAST_LINES_BYTES:]
            if not piece:
                sources.remove(log)
    code = process.wait()
    print(f"elaunch: the job's etcd ended with exit code {code}\n{output.decode(errors='replace')}", file=sys.stderr)
    return 1


def _answers(secret: Secret, place: str) -> bool:
    address = endpoints(place)[0]
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address.host, address.host)
    connection = http.client.HTTPSConnection(host, address.port, context=secret.client_context(), timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
