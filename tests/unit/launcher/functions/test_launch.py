"""elaunch.launch: its configuration, its signals, and the exceptions of a job that failed."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch import ChildFailedError, JobFailed
from elaunch.launcher.functions.launch import LaunchConfig, _forwarded, as_ours, check, launch, option_argv
from elaunch.launcher.options.options import Options, parse
from tests.harness import RUN_LIMIT_S


@pytest.fixture(autouse=True)
def torchs_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a folder for each of its configurations, and leaves it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def options(**fields: Any) -> Options:
    given = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **fields}
    parsed = parse([*option_argv(LaunchConfig(**given)), "train.py"], {})
    assert isinstance(parsed, Options)
    return parsed


def test_the_fields_their_order_and_their_defaults_are_those_of_torch() -> None:
    from torch.distributed.launcher.api import LaunchConfig as Torchs

    ours, theirs = (
        {field.name: (field.default, field.default_factory) for field in dataclasses.fields(config)}
        for config in (LaunchConfig, Torchs)
    )

    # A newer torch may have more. They are asked for by name, and refused then.
    assert list(ours)[:-1] == [name for name in theirs if name in ours]
    assert {name: default for name, default in ours.items() if name in theirs}.items() <= theirs.items()
    assert list(ours)[-1] == "options"


def test_a_configuration_of_torchs_own_means_the_same() -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig as Torchs
    from torch.numa.binding import AffinityMode, NumaOptions

    fields: dict[str, Any] = {
        "min_nodes": 2,
        "max_nodes": 4,
        "nproc_per_node": 3,
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull, redirects=Std.OUT, tee={0: Std.ERR}, local_ranks_filter={0}),
        "run_id": "job",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "node0:29400",
        "numa_options": NumaOptions(AffinityMode.CORE_COMPLEX),
        "log_line_prefix_template": "${rank} ",
    }

    assert option_argv(as_ours(Torchs(**fields))) == option_argv(LaunchConfig(**fields))
    read = options(**fields)
    assert read.numa_binding is not None
    assert read.numa_binding.value == "core-complex"
    assert read.local_ranks_filter == {0}
    assert read.log_line_prefix_template == "${rank} "
    assert read.log_dir is None


def test_the_configuration_of_an_older_torch_has_the_defaults_of_the_fields_that_it_lacks() -> None:
    """torch 2.6 had neither signals, filters, NUMA, a virtual local rank nor a time to stop."""
    with_all = LaunchConfig(1, 1, 2, run_id="job")
    newer = {"event_log_handler", "numa_options", "signals_to_handle", "shutdown_timeout", "virtual_local_rank"}
    newer |= {"options", "duplicate_stdout_filters", "duplicate_stderr_filters"}
    older = SimpleNamespace(**{name: value for name, value in vars(with_all).items() if name not in newer})

    call = launch(older, print)  # type: ignore[arg-type]

    assert call._config == with_all


def test_a_job_gets_the_signals_that_would_end_the_program_and_no_others() -> None:
    """In the background of a script SIGINT is ignored, and under nohup SIGHUP."""
    got: list[int] = []
    job: Any = SimpleNamespace(send_signal=got.append)
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    seen: list[int] = []
    try:
        with _forwarded(job, ["SIGTERM", "SIGINT", "SIGHUP"], seen):
            for number in (signal.SIGTERM, *numbers):
                signal.raise_signal(number)
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, *numbers)]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    assert seen == got == [signal.SIGTERM, signal.SIGINT]
    assert handlers == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]


# Ctrl-C comes when elaunch's own modules are being imported.
INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "elaunch.launcher.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


def test_an_interrupted_job_that_has_not_begun_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)

    job = subprocess.run(
        [sys.executable, "-m", "elaunch.launcher.functions.job", str(os.getpid()), "train", "9"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )

    assert (job.returncode, job.stdout, job.stderr) == (128 + signal.SIGINT, b"", b"")


FAILURE = {
    "kind": "exception",
    "sentence": "rank 1 (local rank 1 on host, pid 9) raised ValueError: no in generation 0",
    "message": "raised ValueError: no",
    "host": "host",
    "failed_at": 5.5,
    "rank": 1,
    "local_rank": 1,
    "pid": 9,
    "code": 1,
    "traceback": "Traceback (most recent call last):\nValueError: no\n",
}


def failed(**fields: Any) -> ChildFailedError:
    outcome = {"outcome": "failed", "exit_code": 1, "text": "train FAILED", "failure": {**FAILURE, **fields}}
    with pytest.raises(ChildFailedError) as raised:
        check(outcome, 1, "train")
    return raised.value


def test_a_failed_rank_has_its_traceback() -> None:
    error = failed()

    rank, failure = error.get_first_failure()
    assert (rank, failure.local_rank, failure.pid, failure.exitcode) == (1, 1, 9, 1)
    assert failure.message["extraInfo"]["py_callstack"] == FAILURE["traceback"]
    assert (str(error), error.name, error.exit_code) == ("train FAILED", "train", 1)


def test_it_is_found_by_an_except_that_was_written_for_torch() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError as Torchs

    assert isinstance(failed(), Torchs)


def test_it_goes_through_a_pickle() -> None:
    error = failed(traceback="")

    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == str(error)
    assert copy.failures == error.failures
    assert copy.failures[1].message == "raised ValueError: no"


@pytest.mark.parametrize("outcome", ["interrupted", "refused", "unknown"])
def test_a_job_that_no_rank_failed_is_no_failure_of_a_rank(outcome: str) -> None:
    with pytest.raises(JobFailed, match=r"^elaunch: stopped$") as raised:
        check({"outcome": outcome, "exit_code": 143, "text": "elaunch: stopped\n", "failure": FAILURE}, 143, "train")

    assert type(raised.value) is JobFailed
    assert raised.value.exit_code == 143


@pytest.mark.parametrize(("code", "how"), [(-9, "was ended by SIGKILL"), (1, "ended with exit code 1")])
def test_a_job_without_a_response_is_an_error_with_its_end(code: int, how: str) -> None:
    with pytest.raises(JobFailed, match=f"elaunch {how} before the outcome of train was known"):
        check({}, code, "train")
