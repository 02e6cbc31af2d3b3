"""`launch(config, entrypoint)(*args, **named)`: run a function on all ranks, and return what this node's returned.

The job is a child process, so it works from any thread, and in a notebook. What the two tell each other, and what
workers return, is in files without a name in any folder: nothing is left behind when either is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import IO, Any

from elaunch.launcher.errors import UsageError
from elaunch.launcher.functions import carried, errors
from elaunch.launcher.functions.config import LaunchConfig, as_ours, option_words
from elaunch.launcher.host import interpreter_options


class launch:
    """Runs `entrypoint` on all ranks of a job, when it is called with the arguments that each rank gets.

    `entrypoint` is a function, or the name of a command whose arguments are text. The call returns a map from global
    rank to what the function returned there, for the ranks of this node; an empty one for a command. Each node makes
    the same call.

    Raises UsageError for a wrong configuration, SiteError if the other nodes cannot be reached, PicklingError for what
    cannot be sent, ChildFailedError if a worker failed, JobFailed if the job ended without success in another way, and
    KeyboardInterrupt after Ctrl-C, when the workers have ended.
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
        name = carried.name_of(self._entrypoint)
        if named and isinstance(self._entrypoint, str):
            raise UsageError(
                f"{name} is a command, and its arguments are words, but the call names {', '.join(named)}; give words,"
                f' as in ("--{next(iter(named))}", "…")'
            )
        words = option_words(self._config)
        with ExitStack() as opened:
            answer = opened.enter_context(_unnamed_file("answer"))
            results = [opened.enter_context(_unnamed_file("result")) for _ in range(self._config.nproc_per_node)]
            fds = [file.fileno() for file in (answer, *results)]
            call = ""
            if isinstance(self._entrypoint, str):
                words += ["--no-python", self._entrypoint, *map(str, args)]
            else:
                file = opened.enter_context(_unnamed_file("call"))
                carried.write_call(file, self._entrypoint, args, named)
                file.flush()
                fds.append(file.fileno())
                call = str(file.fileno())
            numbers = ",".join(str(file.fileno()) for file in results)
            self._run([str(os.getpid()), name, str(answer.fileno()), call, numbers, *words], fds, answer, name)
            return self._returned(answer, results, name)

    def _run(self, words: list[str], fds: list[int], answer: IO[bytes], name: str) -> None:
        """Run the job to its end. Raises as the class says."""
        command = [sys.executable, *interpreter_options(sys.orig_argv[1:]), "-m", "elaunch.launcher.functions.job"]
        environ = dict(os.environ)
        if self._config.log_line_prefix_template is not None:
            environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = self._config.log_line_prefix_template
        is_main = threading.current_thread() is threading.main_thread()
        with _Forwarding(self._config.signals_to_handle.split(",") if is_main else ()) as forwarding:
            process = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                env=environ,
                pass_fds=fds,
                # A terminal's Ctrl-C must reach the job once. In another thread nobody can forward it.
                start_new_session=is_main,
            )
            try:
                forwarding.begin(process)
                code = process.wait()
            finally:
                if process.returncode is None:
                    # A handler of the program's has raised.
                    process.terminate()
                    process.wait()
        if signal.SIGINT in forwarding.seen:
            raise KeyboardInterrupt
        errors.check(_told(answer), code, name)
        for signum in forwarding.seen:
            # It came too late for the job, so it is this process's after all.
            signal.raise_signal(signum)

    def _returned(self, answer: IO[bytes], results: list[IO[bytes]], name: str) -> dict[int, Any]:
        generation = _told(answer)["generation"]
        if isinstance(self._entrypoint, str):
            return {}
        found = (carried.read_value(file, generation, name) for file in results)
        return dict(each for each in found if each)


# torch's name.
elastic_launch = launch


class _Forwarding:
    """Sends the signals that would end or interrupt this process to the job instead, until the job has ended.

    A signal that the program handles itself stays the program's. `seen` are the signals that were sent on.
    """

    def __init__(self, names: Iterable[str]) -> None:
        known = signal.Signals.__members__
        self._signals = [known[name.strip()] for name in names if name.strip() in known]
        self._before: dict[int, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        # Those that came before the job's process was there.
        self._early: list[int] = []
        self.seen: list[int] = []

    def __enter__(self) -> _Forwarding:
        for signum in self._signals:
            handler = signal.getsignal(signum)
            # As the command does, and torch: a script's `&` ignores these.
            is_in_background = handler is signal.SIG_IGN and signum in (signal.SIGINT, signal.SIGQUIT)
            if is_in_background or handler in (signal.SIG_DFL, signal.default_int_handler):
                self._before[signum] = signal.signal(signum, self._forward)
        return self

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        # In this order: at any moment a signal comes either here or to the process, and to one of them only.
        self._process = process
        while self._early:
            process.send_signal(self._early.pop(0))

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        self.seen.append(signum)
        if self._process:
            self._process.send_signal(signum)
        else:
            self._early.append(signum)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def _unnamed_file(name: str) -> IO[bytes]:
    return open(os.memfd_create(f"elaunch-{name}"), "w+b")  # noqa: PTH123


def _told(answer: IO[bytes]) -> dict[str, Any]:
    answer.seek(0)
    try:
        told: dict[str, Any] = json.loads(answer.read())
    except ValueError:
        # The job was killed before it had written all of it.
        return {}
    return told
