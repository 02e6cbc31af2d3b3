"""`launch(config, entrypoint)(*args, **named)`: run a function on all ranks, and return this node's results.

The job is a child process, so it works from any thread, and in a notebook. Calls, responses and results are in memfds
(memfd_create(2)): nothing is left behind when a process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import IO, Any

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.functions import worker
from elaunch.launcher.host import interpreter_options

# torch's default. That of the command is shorter.
_JOIN_TIMEOUT_S = 900
_TORCHS = "torch.distributed.elastic.multiprocessing.errors"
_NOT_AVAILABLE = "<N/A>"


class launch:
    """Runs `entrypoint` on all ranks of a job, when it is called with the arguments that each rank gets.

    `entrypoint` is a function, or the name of a command whose arguments are text. The call returns a map from global
    rank to what the function returned there, for the ranks of this node; an empty one for a command. Each node makes
    the same call.

    Raises UsageError for a wrong configuration, SiteError if the other nodes cannot be reached, PicklingError for what
    cannot be sent, EOFError if a rank exited with 0 before the function returned, ChildFailedError if a worker failed,
    JobFailed for any other outcome than success, and KeyboardInterrupt after Ctrl-C, when the workers have exited.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        if not isinstance(config.nproc_per_node, int):
            raise UsageError(
                f"nproc_per_node is {config.nproc_per_node!r} and a function needs a whole number of workers;"
                " give one, for example torch.cuda.device_count()"
            )
        self._config = as_ours(config)
        self._entrypoint = entrypoint

    def __call__(self, /, *args: Any, **named: Any) -> dict[int, Any]:
        name = worker.name_of(self._entrypoint)
        if named and isinstance(self._entrypoint, str):
            raise UsageError(
                f"{name} is a command, and its arguments are text, but the call names {', '.join(named)}; give text,"
                f' as in ("--{next(iter(named))}", "…")'
            )
        argv = option_argv(self._config)
        with ExitStack() as opened:
            names = ("response", "call", *["result"] * self._config.nproc_per_node)
            files = [opened.enter_context(open(os.memfd_create(f"elaunch-{each}"), "w+b")) for each in names]  # noqa: PTH123
            _, call, *results = files
            if isinstance(self._entrypoint, str):
                argv += ["--no-python", self._entrypoint, *map(str, args)]
            else:
                worker.write_call(call, self._entrypoint, args, named)
                call.flush()
                # Nodes compare their programs and arguments, so files of this node are not among them.
                argv += ["--module", worker.__name__, name, "${local_rank}"]
            outcome = self._run(name, argv, files)
            if isinstance(self._entrypoint, str):
                return {}
            found = (worker.read_value(file, outcome["generation"], name) for file in results)
            return dict(each for each in found if each)

    def _run(self, name: str, argv: list[str], files: Sequence[IO[bytes]]) -> dict[str, Any]:
        """Run the job to its end, and return its outcome. Raises as the class does."""
        fds = [file.fileno() for file in files]
        command = [sys.executable, *interpreter_options(), "-m", "elaunch.launcher.functions.job"]
        is_main = threading.current_thread() is threading.main_thread()
        seen: list[int] = []
        process = subprocess.Popen(
            [*command, str(os.getpid()), name, ",".join(map(str, fds)), *argv],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            # A terminal's Ctrl-C must reach the job once. No other thread can forward it.
            start_new_session=is_main,
        )
        try:
            with _forwarded(process, self._config.signals_to_handle.split(",") if is_main else (), seen):
                code = process.wait()
        finally:
            if process.returncode is None:
                # A signal handler of the program has raised.
                process.terminate()
                process.wait()
        if signal.SIGINT in seen:
            raise KeyboardInterrupt
        files[0].seek(0)
        try:
            outcome = json.loads(files[0].read())
        except ValueError:
            # The job was killed before it had written all of it.
            outcome = {}
        check(outcome, code, name)
        for signum in seen:
            # The signal came too late for the job, so this process gets it.
            signal.raise_signal(signum)
        return dict(outcome)


# torch's name.
elastic_launch = launch


@contextmanager
def _forwarded(process: subprocess.Popen[bytes], names: Iterable[str], seen: list[int]) -> Iterator[None]:
    """Send signals that would end or interrupt this process to the job instead, and note them in `seen`.

    A signal that the program handles itself is not forwarded.
    """

    def forward(signum: int, _frame: FrameType | None) -> None:
        seen.append(signum)
        process.send_signal(signum)

    before: dict[int, Any] = {}
    for signum in [signal.Signals[name.strip()] for name in names if name.strip() in signal.Signals.__members__]:
        handler = signal.getsignal(signum)
        # Forwarded too, as in the command and in torch: a shell ignores these for `&`.
        is_in_background = handler is signal.SIG_IGN and signum in (signal.SIGINT, signal.SIGQUIT)
        if is_in_background or handler in (signal.SIG_DFL, signal.default_int_handler):
            before[signum] = signal.signal(signum, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class LaunchConfig:
    """How many workers there are, and where nodes meet: torch's fields in torch's order, with torch's defaults.

    docs/functions.md has each field's meaning here. `monitor_interval`, `start_method`, `metrics_cfg` and
    `event_log_handler` are accepted and have no effect. `options` is elaunch's own: further options of the command
    `elaunch`, as on its command line; they win.

    Source: torch/distributed/launcher/api.py.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", _JOIN_TIMEOUT_S)
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout is {self.shutdown_timeout}, not a number of seconds; give 0 or more")


def as_ours(config: Any) -> LaunchConfig:
    """torch's own LaunchConfig as this class. Fields that an older torch lacks have their defaults."""
    known = {each.name: getattr(config, each.name) for each in fields(LaunchConfig) if hasattr(config, each.name)}
    return LaunchConfig(**known)


def option_argv(config: LaunchConfig) -> list[str]:
    """The options of the command `elaunch` that are equivalent to `config`."""
    argv = [
        f"--nnodes={config.min_nodes}:{config.max_nodes}",
        f"--nproc-per-node={config.nproc_per_node}",
        f"--max-restarts={config.max_restarts}",
        f"--stop-grace={config.shutdown_timeout}",
        # Each call starts the workers of its own node, also in a scheduler's job.
        "--scheduler=none",
    ]
    given = {
        "run-id": config.run_id,
        "role": config.role,
        "signals-to-handle": config.signals_to_handle,
        "local-addr": config.local_addr,
        "duplicate-stdout-filters": ",".join(config.duplicate_stdout_filters or ()),
        "duplicate-stderr-filters": ",".join(config.duplicate_stderr_filters or ()),
        "numa-binding": config.numa_options and config.numa_options.affinity_mode.value,
    }
    argv += [f"--{name}={value}" for name, value in given.items() if value]
    if config.virtual_local_rank:
        argv.append("--virtual-local-rank")
    if config.log_line_prefix_template is not None:
        argv.append(f"--log-line-prefix-template={config.log_line_prefix_template}")
    return [*argv, *_rendezvous(config), *_logs(config.logs_specs), *config.options]


def _rendezvous(config: LaunchConfig) -> Iterator[str]:
    is_static = config.rdzv_backend == "static"
    if config.max_nodes == 1 and not is_static:
        # One node needs no rendezvous. A static job's endpoint is also MASTER_ADDR and MASTER_PORT.
        return
    settings = dict(config.rdzv_configs)
    if "join_timeout" in settings:
        # torch's c10d reads this one; the other is always set.
        settings.pop("timeout", None)
    node_rank = settings.pop("rank", None)
    yield f"--rdzv-backend={config.rdzv_backend}"
    if config.rdzv_endpoint:
        yield f"--rdzv-endpoint={config.rdzv_endpoint}"
    if is_static and node_rank is not None:
        yield f"--node-rank={node_rank}"
    if config.max_nodes > 1:
        yield f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}"


def _logs(specs: Any) -> Iterator[str]:
    """The options that are equivalent to torch's `LogsSpecs`, whose arguments have no public names."""
    redirects, tee = (getattr(specs, name, None) for name in ("_redirects", "_tee"))
    if redirects or tee:
        if specs.root_log_dir and specs.root_log_dir != os.devnull:
            yield f"--log-dir={specs.root_log_dir}"
        yield f"--redirects={_streams(redirects or 0)}"
        yield f"--tee={_streams(tee or 0)}"
    if shown := getattr(specs, "_local_ranks_filter", None):
        yield f"--local-ranks-filter={','.join(str(rank) for rank in sorted(shown))}"


def _streams(choice: int | Mapping[int, int]) -> str:
    if isinstance(choice, Mapping):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in sorted(choice.items()))
    return str(int(choice))


class JobFailed(Exception):
    """The job did not succeed. `exit_code` is that of the command `elaunch`."""

    def __init__(self, text: str, exit_code: int) -> None:
        # Not `super()`: that may be torch's class, which builds its own message.
        Exception.__init__(self, text, exit_code)
        self.text, self.exit_code = text, exit_code

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ProcessFailure:
    """The worker that failed first. The fields down to `timestamp`, and `error_file`, have torch's names and meanings.

    `message` is text, or, for an exception, what `@record` writes: a map with `message` and `extraInfo`. `sentence`
    names the rank that failed, and how, and `advice` what to do about it, if that is known.
    """

    local_rank: int
    pid: int
    exitcode: int
    message: Any
    timestamp: int
    host: str
    sentence: str
    error_file: str = _NOT_AVAILABLE
    traceback: str = ""
    advice: str = ""


class ChildFailedError(JobFailed):
    """A worker failed, and no restart was left or could help. The text is elaunch's report, with the traceback.

    `failures` has the first failure, by its global rank. If torch's module of errors is loaded, the exception is
    also torch's ChildFailedError, so that an `except` clause for that catches it.
    """

    def __init__(self, name: str, failures: Mapping[int, ProcessFailure], text: str, exit_code: int) -> None:
        JobFailed.__init__(self, text, exit_code)
        self.name = name
        self.failures = dict(failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        return next(iter(self.failures.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return child_failed, (self.name, self.failures, self.text, self.exit_code)


def child_failed(name: str, failures: Mapping[int, ProcessFailure], text: str, exit_code: int) -> ChildFailedError:
    torchs = sys.modules.get(_TORCHS)
    bases = (ChildFailedError, torchs.ChildFailedError) if torchs else (ChildFailedError,)
    made: ChildFailedError = type("ChildFailedError", bases, {"__module__": __name__})(name, failures, text, exit_code)
    return made


def check(outcome: Mapping[str, Any], code: int, name: str) -> None:
    """Raise the job's failure, unless it succeeded. `outcome` is the job's response, and empty if it was killed before.

    Raises UsageError, SiteError, ChildFailedError and JobFailed.
    """
    if not outcome:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise JobFailed(
            f"elaunch {how} before the outcome of {name} was known; see its last lines on stderr",
            128 - code if code < 0 else code,
        )
    for kind in (UsageError, SiteError):
        if outcome["outcome"] == kind.__name__:
            raise kind(outcome["text"])
    if outcome["exit_code"] == 0:
        return
    failure = outcome.get("failure")
    if failure and "rank" in failure and outcome["outcome"] == "failed":
        known = {each.name: failure[each.name] for each in fields(ProcessFailure) if each.name in failure}
        timestamp = int(failure["failed_at"])
        if failure.get("traceback"):
            extra = {"py_callstack": failure["traceback"], "timestamp": str(timestamp)}
            known["message"] = {"message": failure["message"], "extraInfo": extra}
        first = ProcessFailure(**known, exitcode=failure.get("code", -1), timestamp=timestamp)
        raise child_failed(name, {failure["rank"]: first}, outcome["text"], outcome["exit_code"])
    raise JobFailed(outcome["text"].strip(), outcome["exit_code"])
