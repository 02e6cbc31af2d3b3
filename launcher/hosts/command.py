"""`elaunch --hosts`: starts the same elaunch on each host over ssh, shows their output, and ends them together.

On each host `node` checks first that the job can start there. Only if all can, the agents start: then this process
passes output and signals on, and the agents do the rest as under a scheduler (`schedulers.detect`).
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from elaunch import __version__
from elaunch.agent.linux import in_threads
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, can_be_bound, interpreter_options, owner_of, routable_addresses
from elaunch.launcher.options.hostlist import Host, parse_hostfile
from elaunch.launcher.options.options import Options, argv_of
from elaunch.launcher.options.values import ENDPOINT_VARIABLES
from elaunch.launcher.preflight import check_command, read_secret
from elaunch.launcher.schedulers.detect import HOSTS, HOSTS_VARIABLE
from elaunch.strict_json import parse_json

Log = Callable[[str], None]
_PIPE = subprocess.PIPE
_CONNECT_S = 10
# From the connection to the reply: a login shell, and Python's imports from a shared disk.
_REPLY_S = 60.0
_PATIENT_S = 3.0
_RESOLVE_S = 6.0
_LOGINS_MAX, _LOGIN_S = 9, 1.0
# How long an agent may take beyond the job's own graces, and an ssh whose host does not respond.
_END_S = 5.0
_LEFT_BEHIND_MS = 2_000
_LINE_BYTES_MAX = 1 << 20
_SEEN_MAX = 10_000
_TIME = re.compile(rb"[0-9]{4}(-[0-9]{2}){2} [0-9]{2}(:[0-9]{2}){2} ")
_OF_WORKER = re.compile(rb"\[[^]]+\][: ].")
_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ControlMaster=no"),
    # Ends the connection to a host that is gone, after the job has noticed it by its lease.
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
_SENT = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*", "TORCH*", "OMP_*", "MKL_*", "CUDA_*", "ROCR_*"),
    *("HIP_*", "NCCL_*", "RCCL_*", "GLOO_*", "UCX_*", "FI_*", "HF_*", "TOKENIZERS_*", "WANDB_*", "ACCELERATE_*"),
    *("FSDP_*", "PET_*", "ELAUNCH_WARM", "ELAUNCH_ENDPOINT", "ETCDCTL_*", "ASCEND_*", "HABANA_*", "ZE_*", "MLFLOW_*"),
)
# Options that only this process reads.
_NOT_SENT = ("PET_HOSTS", "PET_HOSTFILE", "PET_SSH_*", "PET_DRY_RUN", "PET_SCHEDULER", "PET_TOKEN_FILE")
_OWN_OPTIONS = ("hosts", "hostfile", "ssh_command", "ssh_env", "dry_run", "scheduler", "token_file")
_OF_ONE_NODE = ("node_rank", "local_addr", "standalone", "master_addr")
_WAYS_OUT = {
    "Permission denied": "log in with a key (ssh-copy-id {0}): no password can be typed here",
    "Host key verification failed": "accept its key once: ssh {0}",
    "Could not resolve hostname": "correct its name",
    "Connection (closed|reset) by": "MaxStartups of its sshd, or of a jump host's, limits the logins at once",
}


def run_on_hosts(options: Options, environ: Mapping[str, str], log: Log) -> int:
    """Run the job of `options` on its hosts. Returns its exit code. Raises UsageError and SiteError."""
    hosts = _hosts_of(options)
    _check(options, len(hosts))
    ssh, mark = options.ssh_command or ("ssh",), f"elaunch-{secrets.token_hex(8)}"
    node = [sys.executable, *interpreter_options(), "-m", "elaunch.launcher.hosts.node", mark]
    resolved = in_threads({host: partial(_is_here, host) for host in hosts}, _RESOLVE_S, "elaunch-resolve")
    here = {host for host, is_here in resolved.items() if is_here}
    # `exec` and plain words: sh, bash, zsh, fish and tcsh read it alike.
    by_ssh = {host: [*ssh, *_SSH_OPTIONS, host.name, f"exec {shlex.join(node)}"] for host in hosts}
    commands = by_ssh | dict.fromkeys(here, node)
    if options.dry_run:
        with suppress(BrokenPipeError):
            for host, command in commands.items():
                print(f"{shlex.join(command)}  # {shlex.join(['elaunch', *_argv(options, host)])}")
        return 0
    if here != set(hosts):
        check_command(ssh[0], "--ssh-command ")
    token = _token(options, environ)
    # With the links in it, which may lead elsewhere on another host.
    pwd = os.environ.get("PWD", "")
    folder = pwd if pwd and Path(pwd).exists() and Path(pwd).samefile(".") else str(Path.cwd())
    shared = {"version": __version__, "folder": folder, "environ": _environment(options, environ, log)}
    job = _Job(options, mark, log)
    try:
        for host, command in commands.items():
            # An sshd, perhaps of a jump host, may refuse ten logins at once (MaxStartups).
            if len(job.waiting()) >= _LOGINS_MAX and (signum := job.next(time.monotonic() + _LOGIN_S)):
                return 128 + signum
            job.start(host, host in here, command, _message(argv=_argv(options, host), **shared))
        if signum := job.await_replies():
            return 128 + signum
        return job.run(token)
    finally:
        job.end()


def _hosts_of(options: Options) -> tuple[Host, ...]:
    path = options.hostfile
    if options.hosts and path:
        raise UsageError(f"--hostfile {path} contradicts --hosts; drop one of them")
    if not path:
        return options.hosts
    try:
        return parse_hostfile(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read ({error.strerror}); give a file of hosts") from None
    except ValueError as error:
        raise UsageError(f"--hostfile {path} {error}") from None


def _check(options: Options, count: int) -> None:
    """Raises UsageError for options that mean nothing together with --hosts."""
    if not count:
        raise UsageError("--dry-run shows the commands of --hosts; give --hosts HOST,HOST, or drop it")
    least, most = options.nnodes
    if "nnodes" in options.given and least > count:
        raise UsageError(f"--nnodes {least} is more than the hosts ({count}); add hosts, or lower it")
    if "nnodes" in options.given and most == 1 < count:
        raise UsageError(f"--nnodes 1 contradicts --hosts, which has {count} hosts; drop one of them")
    if options.target == "-":
        raise UsageError(
            "- reads the program from stdin, which the hosts do not share; give a file that all of them have"
        )
    if given := [name.replace("_", "-") for name in _OF_ONE_NODE if name in options.given]:
        raise UsageError(f"--{given[0]} is about one node, and --hosts starts all of them; drop one of them")


def _token(options: Options, environ: Mapping[str, str]) -> str:
    """The job's secret; a new one unless the store is an etcd, which has users of its own."""
    if token := environ.get("ELAUNCH_TOKEN") or (read_secret(options.token_file) if options.token_file else ""):
        return token
    endpoint = ",".join(map(str, options.rdzv_endpoint)) or next(filter(None, map(environ.get, ENDPOINT_VARIABLES)), "")
    return "" if "," in endpoint or "://" in endpoint else secrets.token_hex(16)


def _environment(options: Options, environ: Mapping[str, str], log: Log) -> dict[str, str]:
    """The variables that the hosts get from this shell."""

    def matching(*patterns: str) -> set[str]:
        return {name for name in environ if any(fnmatchcase(name, each) for each in patterns)}

    if absent := [name for name in options.ssh_env if not matching(name)]:
        log(f"--ssh-env: {', '.join(absent)} is not set here, and so not on the hosts")
    return {name: environ[name] for name in sorted(matching(*_SENT, *options.ssh_env) - matching(*_NOT_SENT))}


def _is_here(host: Host) -> bool:
    # A name without an address may be one of ssh's configuration.
    with suppress(NoAddress):
        return "@" not in host.name and owner_of(host.name) is Owner.THIS_HOST
    return False


def _argv(options: Options, host: Host) -> list[str]:
    """The command line of one host's elaunch."""
    typed = {name: value for name, value in options.typed.items() if name not in _OWN_OPTIONS}
    slots = {} if host.slots is None else {"nproc_per_node": str(host.slots)}
    return argv_of({**typed, **slots, "scheduler": HOSTS}, options.program)


@dataclass(eq=False)
class _Remote:
    """A host with its process: ssh, or `node` itself if it is this host.

    `reply` is the node's, `last_line` what stderr had before it. `rests` are the last, unfinished lines of stdout (1)
    and stderr (2). `has_ended`: the process has ended, and its output was passed on.
    """

    host: Host
    is_here: bool
    process: subprocess.Popen[bytes]
    reply: dict[str, str] | None = None
    last_line: str = ""
    rests: dict[int, bytes] = field(default_factory=lambda: {1: b"", 2: b""})
    has_ended: bool = False

    def send(self, message: bytes) -> None:
        assert self.process.stdin
        # ValueError: it is closed already.
        with suppress(OSError, ValueError):
            self.process.stdin.write(message)

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended without the agent's exit code. ssh has 255 for its own errors."""
        code = self.process.returncode
        return code < 0 or (code == 255 and not self.is_here)

    def why_refused(self) -> str:
        """Why the host does not take part; empty if it does."""
        if self.reply is not None:
            return self.reply["refusal"]
        by_hand = "try by hand: ssh {0} true"
        if not self.has_ended:
            what, way_out = f"no response within {_CONNECT_S + _REPLY_S:g} s", by_hand
        elif self.is_lost and not self.is_here:
            what = f"ssh failed ({self.last_line})"
            way_out = next((way for text, way in _WAYS_OUT.items() if re.search(text, self.last_line)), by_hand)
        else:
            why = f"exit code {self.process.returncode}: {self.last_line}".removesuffix(": ")
            what = f"{sys.executable} -m elaunch does not start there ({why})"
            way_out = "all hosts need the same environment at the same path"
        return f"{what}; {way_out.format(self.host.name)}"


def _message(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _reply_in(text: bytes) -> dict[str, str]:
    """A node's reply: `refusal`, and the ends of its connection. Another text is a refusal."""
    with suppress(ValueError):
        reply = parse_json(text)
        if isinstance(reply, dict) and "refusal" in reply:
            return {name: str(value) for name, value in reply.items()}
    return {"refusal": "its reply is not that of elaunch; does its login shell, or --ssh-command, change the output?"}


class _Job:
    """The job's hosts. The inbox gets the number of each signal, and 0 for a host's reply or end."""

    def __init__(self, options: Options, mark: str, log: Log) -> None:
        self._options, self._mark, self._log = options, mark.encode(), log
        self._remotes: list[_Remote] = []
        self._inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
        # For the threads of the hosts.
        self._lock = threading.Lock()
        self._seen: Counter[tuple[_Remote | None, bytes]] = Counter()
        self._closed: set[int] = set()
        for name in options.signals_to_handle:
            # One that is ignored stays so (SIGHUP under nohup).
            if signal.getsignal(number := signal.Signals[name]) is not signal.SIG_IGN:
                signal.signal(number, lambda signum, _: self._inbox.put(signum))

    def start(self, host: Host, is_here: bool, command: list[str], message: bytes) -> None:
        # In a session of its own: Ctrl-C in this terminal would end ssh, and the agent could not save.
        process = subprocess.Popen(command, bufsize=0, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE, start_new_session=True)
        self._remotes.append(remote := _Remote(host, is_here, process))
        threading.Thread(target=self._follow, args=(remote, message), daemon=True).start()

    def _follow(self, remote: _Remote, message: bytes) -> None:
        """Send the job, and pass the process's output on until it has ended.

        In a thread, since ssh may not read, and the reader of this process may be slow.
        """
        remote.send(message)
        pipes = {pipe.fileno(): fd for fd, pipe in ((1, remote.process.stdout), (2, remote.process.stderr)) if pipe}
        poll = select.poll()
        for pipe in pipes:
            poll.register(pipe, select.POLLIN)
        while pipes:
            has_exited = remote.process.poll() is not None
            ready = poll.poll(_LEFT_BEHIND_MS)
            if has_exited and not ready:
                # Another process, which ssh has left behind, holds the pipes.
                break
            for pipe, _ in ready:
                if data := os.read(pipe, 1 << 16):
                    self._show(remote, pipes[pipe], data)
                else:
                    poll.unregister(pipe)
                    del pipes[pipe]
        remote.process.wait()
        for fd, rest in remote.rests.items():
            self._show(remote, fd, b"\n" if rest else b"")
        remote.has_ended = True
        self._inbox.put(0)

    def _show(self, remote: _Remote, fd: int, data: bytes) -> None:
        """Show a host's output. What comes before the node's reply is ssh's or a login shell's.

        Only whole lines: the end of one that another host's has interrupted would have no rank. All agents log the
        job's events, and report its end: a line of stderr without a rank is shown as often as the host has it that has
        it most often.
        """
        data = remote.rests[fd] + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _LINE_BYTES_MAX:
            end = len(data)
        lines, remote.rests[fd] = data[:end], data[end:]
        with self._lock:
            # With a prefix that the user chose, lines of several ranks may be equal.
            if remote.reply is None or (fd == 2 and _TEMPLATE not in os.environ):
                lines = b"".join(line for line in lines.splitlines(keepends=True) if self._is_shown(remote, fd, line))
            while lines and fd not in self._closed:
                try:
                    lines = lines[os.write(fd, lines) :]
                except BlockingIOError:
                    select.select([], [fd], [])
                except OSError as error:
                    self._closed.add(fd)
                    if isinstance(error, BrokenPipeError) and fd == 1:
                        self._inbox.put(signal.SIGPIPE)
                    elif fd == 1:
                        self._log(f"stdout cannot be written ({error.strerror}); training continues without it")

    def _is_shown(self, remote: _Remote, fd: int, line: bytes) -> bool:
        if remote.reply is None:
            if fd == 1 and line.startswith(self._mark):
                remote.reply, remote.rests[2] = _reply_in(line.removeprefix(self._mark)), b""
                self._inbox.put(0)
            elif fd == 2:
                remote.last_line = line.decode(errors="replace").strip() or remote.last_line
            return False
        if fd == 1 or _OF_WORKER.match(line):
            return True
        if len(self._seen) > _SEEN_MAX:
            self._seen.clear()
        text = _TIME.sub(b"", line)
        self._seen[remote, text] += 1
        is_new = self._seen[remote, text] > self._seen[None, text]
        self._seen[None, text] += is_new
        return is_new

    def waiting(self) -> list[str]:
        """The hosts that have neither replied nor ended."""
        return [each.host.name for each in self._remotes if not (each.reply or each.has_ended)]

    def next(self, until_s: float) -> int | None:
        """The next entry of the inbox; None if none comes until then."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX))
        return None

    def await_replies(self) -> int:
        """Wait until every host has agreed. Returns the signal that ended the wait, or 0.

        Raises UsageError or SiteError with a sentence for each host that has not agreed.
        """
        begun_s = time.monotonic()
        for limit_s in (_PATIENT_S, _CONNECT_S + _REPLY_S):
            while waiting := self.waiting():
                signum = self.next(begun_s + limit_s)
                if signum:
                    return signum
                if signum is None:
                    break
            if waiting and limit_s == _PATIENT_S:
                self._log(f"waiting for {', '.join(waiting)} (ssh)")
        if refused := [each for each in self._remotes if each.why_refused()]:
            text = "\n".join([*(f"{each.host.name}: {each.why_refused()}" for each in refused), "no host has started"])
            raise (UsageError if all(each.reply for each in refused) else SiteError)(text)
        return 0

    def run(self, token: str) -> int:
        """Start the agents, and pass signals on until all have ended. Returns the job's exit code."""
        remotes, log, options = self._remotes, self._log, self._options
        head, name = _head(remotes), f"hosts-{secrets.token_hex(4)}"
        for index, each in enumerate(remotes):
            environ = {HOSTS_VARIABLE: f"{index} {len(remotes)} {head} {name}"}
            each.send(_message(environ=environ | ({"ELAUNCH_TOKEN": token} if token else {})))
        signals: list[int] = []
        stop_s = float("inf")

        def stop(signum: int) -> None:
            nonlocal stop_s
            for each in remotes:
                each.send(_message(signal=signum))
            # The second signal kills the workers.
            grace_s = 0.0 if signals else options.stop_grace
            stop_s = min(stop_s, time.monotonic() + grace_s + _END_S)
            signals.append(signum)

        least = options.nnodes[0] if "nnodes" in options.given else len(remotes)
        left, outcome = list(remotes), None
        while left:
            for each in [each for each in left if each.has_ended]:
                left.remove(each)
                code = each.process.returncode
                # An agent that cannot start has code 2 or 3. No other host can take its place.
                if signals or not (each.is_lost or code in (2, 3)):
                    continue
                why = "the connection, or elaunch there, has ended" if each.is_lost else "elaunch has ended"
                number = f"{'signal' if code < 0 else 'exit code'} {abs(code)}"
                is_needed = len(left) < least
                needed = f"; the job needs {least} nodes, and is stopped" if left and is_needed else ""
                log(f"{each.host.name}: {why} ({number}){needed}")
                if is_needed:
                    outcome = 1 if each.is_lost else code
                    stop(signal.SIGTERM)
            signum = self.next(stop_s) if left else None
            if signum is None:
                break
            if signum == signal.SIGPIPE:
                outcome, signum = 128 + signal.SIGPIPE, signal.SIGTERM
                log(f"stopped, since no process reads its stdout any more; exit code {outcome}")
            if signum:
                stop(signum)
        if left:
            log(f"{', '.join(each.host.name for each in left)}: no end in time after the stop signal")
        codes = [each.process.returncode for each in remotes if each.has_ended and not each.is_lost]
        # The agents agree on the outcome, but for one that was excluded or has lost the store.
        agreed = min(codes, key=lambda code: (code == 3, code), default=128 + signals[0] if signals else 3)
        return agreed if outcome is None else outcome

    def end(self) -> None:
        """Kill what still runs, with its children. The end of its stdin ends the agent of another host."""
        for each in self._remotes:
            if each.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, signal.SIGKILL)


def _head(remotes: Sequence[_Remote]) -> str:
    """The first host's address for the others: that to which ssh connected, or from which it connects to them."""
    first, replies = remotes[0], [each.reply or {} for each in remotes]
    if not first.is_here:
        return replies[0].get("server", first.host.name.rpartition("@")[2])
    found = [reply["client"] for reply in replies if "client" in reply and can_be_bound(reply["client"])]
    return next(iter([*found, *routable_addresses()]), first.host.name)
