"""`elaunch --hosts`: starts the same elaunch on each host over ssh, shows their output, and ends them together.

On each host `node` checks first that the job can start there. Only if all can, the agents start: then this process
passes output and signals on, and the agents do the rest as under a scheduler (`schedulers.detect`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from elaunch import __version__
from elaunch.agent.config import LogFormat
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import NoAddress, Owner, can_be_bound, interpreter_options, owner_of
from elaunch.launcher.options.hostlist import Host, parse_hostfile
from elaunch.launcher.options.options import Options, argv_of
from elaunch.launcher.options.values import ENDPOINT_VARIABLES
from elaunch.launcher.preflight import check_command, read_secret
from elaunch.launcher.schedulers.detect import HOSTS

Log = Callable[[str], None]
_PIPE = subprocess.PIPE

_CONNECT_S = 10
# From the connection to the reply: a login shell, and Python's imports from a shared disk.
_REPLY_S = 60.0
_PATIENT_S = 3.0
# How long an agent may take beyond the job's own graces, and an ssh whose host does not respond.
_END_S = 5.0
_POLL_S = 0.5
_TIME = re.compile(rb"[0-9]{4}(-[0-9]{2}){2} [0-9]{2}(:[0-9]{2}){2} ")
_OF_WORKER = re.compile(rb"\[[^]]+\][: ].")
# A prefix of the workers' lines that the user chose may be equal on all hosts.
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
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAYS_OUT = {
    "Permission denied": "log in with a key (ssh-copy-id {0}): no password can be typed here",
    "Host key verification failed": "accept its key once: ssh {0}",
    "Could not resolve hostname": "correct its name",
}


class _Output:
    """This process's stdout and stderr, with whole lines of all hosts. `changed` is set by a reply or a stream's end.

    All agents log the job's events, and report its end: with `is_once`, a line of stderr without a rank's prefix is
    written as often as the host has it that has it most often.
    """

    def __init__(self, *, is_once: bool) -> None:
        self.changed = threading.Event()
        self._is_once, self._lock = is_once, threading.Lock()
        self._seen: Counter[tuple[_Remote | None, bytes]] = Counter()

    def write(self, remote: _Remote, fd: int, line: bytes) -> None:
        # The reader of this process may close the pipe early; the job goes on.
        with self._lock, suppress(BrokenPipeError):
            if fd == 1 or not self._is_once or self._is_new(remote, line):
                while line:
                    line = line[os.write(fd, line) :]

    def _is_new(self, remote: _Remote, line: bytes) -> bool:
        if _OF_WORKER.match(line):
            return True
        line = _TIME.sub(b"", line)
        self._seen[remote, line] += 1
        is_new = self._seen[remote, line] > self._seen[None, line]
        self._seen[None, line] += is_new
        return is_new


def _lines(fd: int) -> Iterator[bytes]:
    """Whole lines from `fd`, also those that end in a carriage return, as a progress bar's do."""
    part = b""
    while data := os.read(fd, 1 << 16):
        *lines, part = re.split(rb"(?<=[\n\r])(?!\n)", part + data)
        yield from lines
    yield part


class _Remote:
    """A host with its process: ssh, or `node` itself if it is this host. `reply` is the node's."""

    def __init__(self, host: Host, command: list[str], output: _Output) -> None:
        self.host, self.is_here = host, command[0] == sys.executable
        self._mark, self._output = command[-1].rpartition(" ")[2].encode(), output
        self.reply: dict[str, str] | None = None
        self._last = ""
        # In a session of its own: Ctrl-C in this terminal would end ssh, and the agent could not save.
        self.process = subprocess.Popen(
            command, bufsize=0, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE, start_new_session=True
        )
        self._readers = [threading.Thread(target=self._read, args=(fd,), daemon=True) for fd in (1, 2)]
        for reader in self._readers:
            reader.start()

    def send(self, **message: object) -> None:
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def _read(self, fd: int) -> None:
        """In a thread: pass on stdout (1) or stderr (2). What comes before the reply is ssh's or a login shell's."""
        stream = self.process.stdout if fd == 1 else self.process.stderr
        assert stream
        for line in _lines(stream.fileno()):
            if self.reply:
                self._output.write(self, fd, line)
            elif fd == 1 and line.startswith(self._mark):
                self.reply = json.loads(line[len(self._mark) :])
                self._output.changed.set()
            elif fd == 2:
                self._last = line.decode(errors="replace").strip() or self._last
        self._output.changed.set()

    def finish(self) -> None:
        """Wait for the last output. A process that ssh has left behind may hold the pipes."""
        for reader in self._readers:
            reader.join(1)

    def why_refused(self) -> str:
        """Why the host does not take part; empty if it does."""
        if self.reply:
            return self.reply["refusal"]
        code, to = self.process.poll(), self.host.destination
        if code is None:
            return f"no response within {_CONNECT_S + _REPLY_S:g} s; try by hand: ssh {to} true"
        self.finish()
        last = self._last
        if code == 255 and not self.is_here:
            hint = next((way for text, way in _WAYS_OUT.items() if text in last), "try by hand: ssh {0} true")
            return f"ssh failed ({last}); {hint.format(to)}"
        return (
            f"{sys.executable} -m elaunch does not start there (exit code {code}: {last}); all hosts need the same"
            " environment at the same path"
        )

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended without the agent's exit code. ssh has 255 for its own errors."""
        code = self.process.poll()
        return code is not None and (code < 0 or (code == 255 and not self.is_here))


def run_on_hosts(options: Options, environ: Mapping[str, str], log: Log) -> int:
    """Run the job of `options` on its hosts. Returns its exit code. Raises UsageError and SiteError."""
    hosts = _hosts_of(options)
    _check(options, len(hosts))
    mark = f"elaunch-{secrets.token_hex(8)}"
    commands = {host: _command(options, host, mark) for host in hosts}
    argvs = [_argv(options, host) for host in hosts]
    if options.dry_run:
        for command, argv in zip(commands.values(), argvs, strict=True):
            print(f"{shlex.join(command)}  # {shlex.join(['elaunch', *argv])}")
        return 0
    environment, token = _environment(options, environ, log), _token(options, environ)
    # With the links in it, which may lead elsewhere on another host.
    pwd = os.environ.get("PWD", "")
    folder = pwd if pwd and Path(pwd).exists() and Path(pwd).samefile(".") else str(Path.cwd())
    remotes: list[_Remote] = []
    with ExitStack() as cleanup:
        cleanup.callback(_end_all, remotes)
        output = _Output(is_once=_TEMPLATE not in environ and options.log_format is not LogFormat.JSON)
        for argv, (host, command) in zip(argvs, commands.items(), strict=True):
            remotes.append(remote := _Remote(host, command, output))
            remote.send(version=__version__, folder=folder, argv=argv, environ=environment)
        _await_replies(remotes, output, log)
        head, job = _head(remotes), f"hosts-{secrets.token_hex(4)}"
        for index, remote in enumerate(remotes):
            of_node = {"INDEX": index, "COUNT": len(remotes), "HEAD": head, "JOB": job}
            variables = {f"ELAUNCH_HOSTS_{name}": str(value) for name, value in of_node.items()}
            remote.send(environ=variables | ({"ELAUNCH_TOKEN": token} if token else {}))
        return _run(remotes, output, options, log)


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
    if "nnodes" in options.given and options.nnodes[0] > count:
        raise UsageError(f"--nnodes {options.nnodes[0]} is more than the hosts ({count}); add hosts, or lower it")
    if options.target == "-":
        raise UsageError(
            "- reads the program from stdin, which the hosts do not share; give a file that all of them have"
        )
    if given := [name.replace("_", "-") for name in _OF_ONE_NODE if name in options.given]:
        raise UsageError(f"--{given[0]} is about one node, and --hosts starts all of them; drop one of them")
    if options.scheduler not in ("auto", "none"):
        raise UsageError(
            f"--scheduler {options.scheduler} contradicts --hosts, which starts the nodes; drop one of them"
        )


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


def _command(options: Options, host: Host, mark: str) -> list[str]:
    node = [sys.executable, *interpreter_options(), "-m", "elaunch.launcher.hosts.node", mark]
    # A name without an address may be one of ssh's configuration.
    with suppress(NoAddress):
        if not host.user and owner_of(host.name) is Owner.THIS_HOST:
            return node
    ssh = options.ssh_command or ("ssh",)
    check_command(ssh[0], "--ssh-command ")
    # `exec` and plain words: sh, bash, zsh, fish and tcsh read it alike.
    return [*ssh, *_SSH_OPTIONS, host.destination, f"exec {shlex.join(node)}"]


def _argv(options: Options, host: Host) -> list[str]:
    """The command line of one host's elaunch."""
    typed = {name: value for name, value in options.typed.items() if name not in _OWN_OPTIONS}
    slots = {} if host.slots is None else {"nproc_per_node": str(host.slots)}
    return argv_of({**typed, **slots, "scheduler": HOSTS}, options.program)


def _head(remotes: Sequence[_Remote]) -> str:
    """The first host's address for the others: that to which ssh connected, or from which it connects to them."""
    first, replies = remotes[0], [each.reply or {} for each in remotes]
    if not first.is_here:
        return replies[0].get("server", first.host.name)
    clients = [reply["client"] for reply in replies if "client" in reply]
    return next((address for address in clients if can_be_bound(address)), first.host.name)


def _await_replies(remotes: Sequence[_Remote], output: _Output, log: Log) -> None:
    """Wait until every host has agreed. Raises UsageError or SiteError with a sentence for each that has not."""
    begun_s, is_logged = time.monotonic(), False
    end_s = begun_s + _CONNECT_S + _REPLY_S
    while waiting := [each.host.name for each in remotes if each.reply is None and each.process.poll() is None]:
        if (now_s := time.monotonic()) >= end_s:
            break
        if now_s >= begun_s + _PATIENT_S and not is_logged:
            log(f"waiting for {', '.join(waiting)} (ssh)")
            is_logged = True
        output.changed.wait(_POLL_S)
        output.changed.clear()
    if refused := [each for each in remotes if each.why_refused()]:
        text = "\n".join([*(f"{each.host.name}: {each.why_refused()}" for each in refused), "no host has started"])
        raise (UsageError if all(each.reply for each in refused) else SiteError)(text)


def _run(remotes: Sequence[_Remote], output: _Output, options: Options, log: Log) -> int:
    """Pass on output and signals until all agents have ended. Returns the job's exit code."""
    signals: list[int] = []

    def pass_on(signum: int, _: object = None) -> None:
        signals.append(signum)
        for each in remotes:
            each.send(signal=signum)

    for name in options.signals_to_handle:
        signal.signal(signal.Signals[name], pass_on)
    refused = 0
    least = options.nnodes[0] if "nnodes" in options.given else len(remotes)
    left, stop_s = list(remotes), float("inf")
    while left and time.monotonic() < stop_s:
        output.changed.wait(_POLL_S)
        output.changed.clear()
        for each in [each for each in left if each.process.poll() is not None]:
            left.remove(each)
            code, is_stopped = each.process.returncode, bool(signals)
            if each.is_lost and not is_stopped:
                log(f"{each.host.name}: the connection has ended ({'signal' if code < 0 else 'exit code'} {abs(code)})")
            # An agent that cannot start has code 2 or 3, and too few others would wait for it.
            if code in (2, 3) and len(left) < least and left and not is_stopped:
                log(f"{each.host.name}: elaunch ended with exit code {code}; the other hosts are stopped")
                refused = code
                pass_on(signal.SIGTERM)
        if not set(signals).isdisjoint(_STOPS):
            stop_s = min(stop_s, time.monotonic() + options.stop_grace + _END_S)
    if left:
        log(f"{', '.join(each.host.name for each in left)}: no response after the stop signal")
    for each in remotes:
        if each not in left:
            each.finish()
    codes = [each.process.returncode for each in remotes if each not in left and not each.is_lost]
    if refused or not codes:
        return refused or (128 + signals[0] if signals else 3)
    # The agents agree on the outcome, but for one that was excluded or lost the store.
    return 0 if 0 in codes else codes[0]


def _end_all(remotes: Sequence[_Remote]) -> None:
    """End the processes that still run: the end of stdin stops an agent."""
    for each in remotes:
        assert each.process.stdin
        each.process.stdin.close()
        if each.reply is None:
            each.process.kill()
    until_s = time.monotonic() + _END_S
    for each in remotes:
        try:
            each.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
