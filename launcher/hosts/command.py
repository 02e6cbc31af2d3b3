"""`elaunch --hosts`: starts the same elaunch on each host over ssh, shows their output, and ends them together.

On each host `node` checks first that the job can start there. Only if all can, the agents start: then this process
passes output and signals on, and the agents do the rest as under a scheduler (`schedulers.detect`).
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import queue
import re
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

from elaunch import __version__
from elaunch.agent.linux import in_threads
from elaunch.agent.serve.event_hook import FLUSH_S
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, can_be_bound, interpreter_options, owner_of, routable_addresses
from elaunch.launcher.options.hostlist import Host, parse_hostfile
from elaunch.launcher.options.options import Options, argv_of
from elaunch.launcher.preflight import check_command, check_folder, read_secret
from elaunch.launcher.schedulers.detect import HOSTS, HOSTS_VARIABLE
from elaunch.launcher.store.locate import given_addresses, given_token
from elaunch.lines import split_lines, write_all
from elaunch.rendezvous.endpoint import is_loopback
from elaunch.rendezvous.secret import new_token
from elaunch.strict_json import parse_json

Log = Callable[[str], None]
_CONNECT_S = 10
# From the connection to the reply: a login shell, and Python's imports from a shared disk.
_REPLY_S = 60.0
_PATIENT_S = 3.0
_LOGINS_MAX, _LOGIN_S = 9, 1.0
# How long an agent may take beyond the job's own graces, and an ssh whose host does not respond.
_END_S = 5.0
# Without a heartbeat for so long a host stops its agent: sshd does not notice a lost network for hours.
_SILENCE_S = 40.0
# Another process may hold ssh's stderr: the ssh to a jump host stays in the background (ControlPersist).
_LEFT_BEHIND_S = 10.0
_SEEN_MAX = 10_000
_TIME = re.compile(rb"[0-9]{4}(-[0-9]{2}){2} [0-9]{2}(:[0-9]{2}){2} ")
# Not the report's "[0]:".
_OF_WORKER = re.compile(rb"(?!\[0\]:\n)\[[^]]+\][: ]")
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ControlMaster=no"),
    # Ends the connection to a host that is gone, after the job has noticed it by its lease.
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
_SENT = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*", "TORCH*", "OMP_*", "MKL_*", "CUDA_*", "ROCR_*"),
    *("HIP_*", "NCCL_*", "RCCL_*", "GLOO_*", "UCX_*", "FI_*", "HF_*", "TOKENIZERS_*", "WANDB_*", "ACCELERATE_*"),
    *("FSDP_*", "PET_*", "ELAUNCH_WARM", "ELAUNCH_ENDPOINT", "ETCDCTL_*", "MLFLOW_*"),
    *("ASCEND_*", "HABANA_*", "ONEAPI_*", "ZE_*"),
)
# Options that only this process reads. Where a node finds them in a variable, its own --scheduler takes precedence.
_OWN_OPTIONS = ("hosts", "hostfile", "ssh_command", "ssh_env", "dry_run", "token_file")
_OF_ONE_NODE = ("node_rank", "local_addr", "standalone", "master_addr")
_WAYS_OUT = {
    "Permission denied": "log in with a key (ssh-copy-id {0}): no password can be typed here",
    "Host key verification failed": "accept its key once: ssh {0}",
    "Could not resolve hostname": "correct its name",
    "Connection (closed|reset) by": "MaxStartups of its sshd, or of a jump host's, limits the logins at once",
    "": "try by hand: ssh {0} true",
}


def run_on_hosts(options: Options, environ: Mapping[str, str], log: Log) -> int:
    """Run the job of `options` on its hosts. Returns its exit code.

    Raises UsageError and SiteError; SystemExit at a signal before all hosts have agreed.
    """
    hosts = _hosts_of(options)
    needed = _check(options, len(hosts))
    ssh, mark = options.ssh_command or ("ssh",), f"elaunch-{secrets.token_hex(8)}"
    node = [sys.executable, *interpreter_options(), "-m", "elaunch.launcher.hosts.node", mark]
    is_here = in_threads({host: partial(_is_here, host) for host in hosts}, _CONNECT_S, "elaunch-resolve")
    # `exec` and plain words: sh, bash, zsh, fish and tcsh read it alike.
    in_shell = f"exec {shlex.join(node)}"
    commands = {host: node if is_here.get(host) else [*ssh, *_SSH_OPTIONS, host.name, in_shell] for host in hosts}
    if options.dry_run:
        lines = (f"{shlex.join(each)}  # elaunch {shlex.join(_argv(options, host))}" for host, each in commands.items())
        print("\n".join(lines))
        return 0
    if not all(map(is_here.get, hosts)):
        check_command(ssh[0], "--ssh-command ")
    sent = _environment(options, environ, log)
    job = _Job(options, needed, mark, log)
    try:
        for host, command in commands.items():
            # An sshd, perhaps of a jump host, may refuse ten logins at once (MaxStartups).
            job.wait(_LOGINS_MAX - 1, _LOGIN_S)
            remote = _Remote(host, command is node, command)
            job.start(remote, version=__version__, argv=_argv(options, host), environ=sent, silence_s=_SILENCE_S)
        job.await_replies()
        return job.run()
    finally:
        job.kill()


def _hosts_of(options: Options) -> tuple[Host, ...]:
    path = options.hostfile
    try:
        return parse_hostfile(Path(path).read_text("utf-8", "replace")) if path else options.hosts
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read ({error.strerror}); give a file of hosts") from None
    except ValueError as error:
        raise UsageError(f"--hostfile {path} {error}") from None


def _check(options: Options, count: int) -> int:
    """The number of hosts that the job needs. Raises UsageError for options that mean nothing together with --hosts."""
    if not count:
        raise UsageError("--dry-run shows the commands of --hosts; give --hosts HOST,HOST, or drop it")
    least, most = options.nnodes if "nnodes" in options.given else (count, count)
    if least > count or most == 1 < count:
        nodes = least if least == most else f"{least}:{most}"
        raise UsageError(f"--nnodes {nodes} contradicts the number of hosts ({count}); drop it, or change the hosts")
    if options.target == "-":
        raise UsageError("- is a program on stdin, which the hosts do not share; give a file that all of them have")
    if given := [name.replace("_", "-") for name in _OF_ONE_NODE if name in options.given]:
        raise UsageError(f"--{given[0]} is about one node, and --hosts starts all of them; drop one of them")
    if (scheduler := options.typed.get("scheduler", "none")) not in ("auto", "none"):
        raise UsageError(f"--scheduler {scheduler} contradicts --hosts, which needs no scheduler; drop one of them")
    check_folder()
    if 255 in options.no_restart_codes:
        raise UsageError("--no-restart-codes 255: ssh has this exit code for a lost connection; choose another")
    return least


def _environment(options: Options, environ: Mapping[str, str], log: Log) -> dict[str, str]:
    """The variables that the hosts get: those of this shell, its folder as PWD, and the job's secret."""
    if absent := [name for name in options.ssh_env if not fnmatch.filter(environ, name)]:
        log(f"--ssh-env: {', '.join(absent)} is not set here, and so not on the hosts")
    names = {name for pattern in (*_SENT, *options.ssh_env) for name in fnmatch.filter(environ, pattern)}
    sent = {name: environ[name] for name in names}
    # With the links in it, which may lead elsewhere on another host.
    pwd = Path(environ.get("PWD") or "/")
    sent["PWD"] = str(pwd if pwd.resolve() == Path.cwd() else Path.cwd())
    addresses, _ = given_addresses(options, environ, "")
    # An etcd has users of its own.
    is_etcd = len(addresses) > 1 or any(address.scheme for address in addresses)
    if token := given_token(options, environ, read_secret) or ("" if is_etcd else new_token()):
        sent["ELAUNCH_TOKEN"] = token
    return sent


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


class _Remote:
    """A host with its process: ssh, or `node` itself if it is this host.

    `reply` is the node's, empty before, and `last_line` what stderr had until then. `has_ended`: the process has ended,
    and its output was passed on.
    """

    def __init__(self, host: Host, is_here: bool, command: Sequence[str]) -> None:
        self.host, self.is_here = host, is_here
        # In a session of its own: Ctrl-C in this terminal would end ssh, and the agent could not save.
        self.process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)
        self.reply: dict[str, str] = {}
        self.last_line = ""
        self.has_ended = False

    def send(self, **message: object) -> None:
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended without the agent's exit code. ssh has 255 for its own errors."""
        return not 0 <= self.process.returncode < 255

    def why_refused(self) -> str:
        """Why the host does not take part; empty if it does."""
        if self.reply:
            return self.reply["refusal"]
        if self.has_ended and self.process.returncode != 255:
            why = f"exit code {self.process.returncode}: {self.last_line}".removesuffix(": ")
            what = f"{sys.executable} -m elaunch does not start there ({why})"
            return f"{what}; all hosts need the same environment at the same path"
        what = f"ssh failed ({self.last_line})" if self.has_ended else f"no response within {_CONNECT_S + _REPLY_S:g} s"
        way_out = next(way for text, way in _WAYS_OUT.items() if re.search(text, self.last_line))
        return f"{what}; {way_out.format(self.host.name)}"


def _reply_in(text: bytes) -> dict[str, str]:
    """A node's reply: `refusal`, and the ends of its connection. Another text is a refusal."""
    with suppress(ValueError):
        reply = parse_json(text)
        if isinstance(reply, dict) and "refusal" in reply:
            return {name: str(value) for name, value in reply.items()}
    return {"refusal": "its reply is not that of elaunch; does its login shell, or --ssh-command, change the output?"}


class _Job:
    """The job's hosts. The inbox gets the number of each signal, and 0 for a host's reply or end.

    `_signum` is the first signal that was passed on, 0 before. `_outcome` is the exit code of a job that this process
    has stopped by itself, because of `_why`; 0 else. `_is_over`: an agent has ended with the exit code of a job that
    has succeeded or failed, one of `_end_codes`.
    """

    def __init__(self, options: Options, needed: int, mark: str, log: Log) -> None:
        self._needed, self._mark, self._log = needed, mark.encode(), log
        self._grace_s = options.stop_grace + (FLUSH_S if options.on_event else 0.0)
        self._remotes: list[_Remote] = []
        self._inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._patient_s, self._stop_s = time.monotonic() + _PATIENT_S, math.inf
        self._signum, self._outcome, self._why = 0, 0, ""
        self._end_codes, self._is_over = {0, 1, *options.no_restart_codes}, False
        # For the threads of the hosts.
        self._template = options.log_line_prefix_template
        self._lock = threading.Lock()
        self._seen: dict[bytes, _Remote] = {}
        for name in options.signals_to_handle:
            # One that is ignored stays so (SIGHUP under nohup).
            if signal.getsignal(number := signal.Signals[name]) is not signal.SIG_IGN:
                signal.signal(number, lambda signum, _: self._inbox.put(signum))

    def start(self, remote: _Remote, **job: object) -> None:
        self._remotes.append(remote)
        threading.Thread(target=self._follow, args=(remote, job), daemon=True).start()

    def _next(self, within_s: float) -> int | None:
        """The next entry of the inbox; None if none comes in time."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=min(max(0.0, within_s), threading.TIMEOUT_MAX))
        return None

    def wait(self, hosts_max: int, within_s: float) -> None:
        """Wait until at most so many hosts have neither replied nor ended. SystemExit at a signal."""
        until_s = time.monotonic() + within_s
        while (now_s := time.monotonic()) < until_s:
            waiting = [each.host.name for each in self._remotes if not (each.reply or each.has_ended)]
            if len(waiting) <= hosts_max:
                return
            if now_s > self._patient_s:
                self._patient_s = math.inf
                self._log(f"waiting for {', '.join(waiting)} (ssh)")
            if signum := self._next(min(until_s, self._patient_s) - now_s):
                sys.exit(128 + signum)

    def await_replies(self) -> None:
        """Wait until every host has agreed. Raises UsageError or SiteError with a sentence for each that has not."""
        self.wait(0, _CONNECT_S + _REPLY_S)
        if refused := [each for each in self._remotes if each.why_refused()]:
            text = "\n".join([*(f"{each.host.name}: {each.why_refused()}" for each in refused), "no host has started"])
            raise (UsageError if all(each.reply for each in refused) else SiteError)(text)

    def run(self) -> int:
        """Start the agents, and pass signals on until all have ended. Returns the job's exit code."""
        place = f"{len(self._remotes)} {_head(self._remotes)} hosts-{secrets.token_hex(4)}"
        for index, each in enumerate(self._remotes):
            each.send(environ={HOSTS_VARIABLE: f"{index} {place}"})
        left, heartbeat_s = list(self._remotes), 0.0
        while left:
            for each in [each for each in left if each.has_ended]:
                left.remove(each)
                self._after_end_of(each, len(left))
            if (now_s := time.monotonic()) >= heartbeat_s:
                heartbeat_s = now_s + _SILENCE_S / 4
                for each in left:
                    # A heartbeat: for 0, kill(2) sends no signal.
                    each.send(signal=0)
            signum = self._next(min(heartbeat_s, self._stop_s) - now_s) if left else 0
            if signum is None and time.monotonic() >= self._stop_s:
                names = ", ".join(each.host.name for each in left)
                self._log(f"{names}: no end in time after the stop signal")
                break
            if signum == signal.SIGPIPE:
                self._stop(signal.SIGTERM, 128 + signum, "no process reads its stdout any more")
            elif signum:
                self._stop(signum)
        codes = [each.process.returncode for each in self._remotes if each.has_ended and not each.is_lost]
        if ends := self._end_codes.intersection(codes):
            # A spare whose program could not start has 1, whatever the others have.
            return min(ends, key=lambda code: code == 1)
        if self._why:
            # The agents' last line has the signal's exit code.
            self._log(f"stopped, since {self._why}; exit code {self._outcome}")
        # An agent that could not start, or has lost the store, does not know the outcome.
        return self._outcome or min(codes, key=lambda code: code in (2, 3), default=128 + self._signum)

    def _after_end_of(self, remote: _Remote, left: int) -> None:
        """Stop the job if it needs this host, whose agent has not taken part to the end."""
        code = remote.process.returncode
        self._is_over |= code in self._end_codes
        # An agent that cannot start has code 2 or 3. No other host can take its place.
        if self._is_over or self._signum or not (remote.is_lost or code in (2, 3)):
            return
        why = f"the job needs {self._needed} nodes" if 0 < left < self._needed else ""
        needed = f"; {why}, and is stopped" if why else ""
        self._log(f"{remote.host.name}: the connection, or elaunch there, has ended (exit code {code}){needed}")
        if left < self._needed:
            self._stop(signal.SIGTERM, 1 if remote.is_lost else code, why)

    def _stop(self, signum: int, outcome: int = 0, why: str = "") -> None:
        """Pass the signal on. The second one kills the workers."""
        for each in self._remotes:
            each.send(signal=signum)
        grace_s = 0.0 if self._signum else self._grace_s
        self._stop_s = min(self._stop_s, time.monotonic() + grace_s + _END_S)
        if not self._signum:
            self._signum, self._outcome, self._why = signum, outcome, why

    def kill(self) -> None:
        """Kill what still runs, with its children. The end of its stdin ends the agent of another host."""
        for each in self._remotes:
            if each.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, signal.SIGKILL)

    def _follow(self, remote: _Remote, job: Mapping[str, object]) -> None:
        """Send the job, which ssh may not read, and pass the process's output on until it has ended."""
        stderr = threading.Thread(target=self._pass_on, args=(remote, 2), daemon=True)
        stderr.start()
        remote.send(**job)
        self._pass_on(remote, 1)
        remote.process.wait()
        stderr.join(_LEFT_BEHIND_S)
        remote.has_ended = True
        self._inbox.put(0)

    def _pass_on(self, remote: _Remote, fd: int) -> None:
        """Show one of the process's streams, in whole lines: the end of one that another host's has cut has no rank."""
        pipe = remote.process.stdout if fd == 1 else remote.process.stderr
        assert pipe
        rest = b""
        while data := os.read(pipe.fileno(), 1 << 16):
            lines, rest = split_lines(rest + data)
            self._show(remote, fd, lines)
        self._show(remote, fd, rest + b"\n" if rest else b"")

    def _show(self, remote: _Remote, fd: int, lines: bytes) -> None:
        with self._lock:
            # Most output is a job's stdout, of which all lines are shown.
            if fd == 2 or not remote.reply:
                lines = b"".join(line for line in lines.splitlines(keepends=True) if self._is_shown(remote, fd, line))
            try:
                write_all(fd, lines)
            except OSError as error:
                gone = (1, 2) if os.path.samestat(os.fstat(1), os.fstat(2)) else (fd,)
                for each in gone:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), each)
                if isinstance(error, BrokenPipeError) and 1 in gone:
                    self._inbox.put(signal.SIGPIPE)
                elif fd == 1:
                    self._log(f"stdout cannot be written ({error.strerror}); training continues without it")

    def _is_shown(self, remote: _Remote, fd: int, line: bytes) -> bool:
        """Whether to show a line. What comes before the node's reply is ssh's or a login shell's.

        All agents log the job's events, and report its end: a line of stderr without a rank is shown if its first host
        has it.
        """
        if not remote.reply:
            if fd == 1 and line.startswith(self._mark):
                remote.reply = _reply_in(line.removeprefix(self._mark))
                self._inbox.put(0)
            elif fd == 2:
                remote.last_line = line.decode(errors="replace").strip() or remote.last_line
            return False
        # With a prefix that the user chose, lines of several ranks may be equal.
        if fd == 1 or self._template or _OF_WORKER.match(line):
            return True
        if len(self._seen) > _SEEN_MAX:
            self._seen.clear()
        return self._seen.setdefault(_TIME.sub(b"", line), remote) is remote


def _head(remotes: Sequence[_Remote]) -> str:
    """The first host's address for the others: that to which ssh connected, or from which it connects to them."""
    first = remotes[0]
    if not first.is_here:
        return first.reply.get("server", first.host.name.rpartition("@")[2])
    clients = [each.reply["client"] for each in remotes if "client" in each.reply]
    # The user's own login, or ssh to a host, may come through a tunnel.
    ours = [each for each in clients if can_be_bound(each) and not is_loopback(each)]
    return next(iter([*ours, *routable_addresses()]), first.host.name)
