"""What is raised when a function's job does not succeed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elaunch.launcher.errors import SiteError, UsageError

_TORCHS = "torch.distributed.elastic.multiprocessing.errors"
_NOT_AVAILABLE = "<N/A>"


class JobFailed(Exception):
    """The job did not succeed. `exit_code` is what the command `elaunch` would have ended with."""

    def __init__(self, text: str, exit_code: int) -> None:
        # Not `super()`: that may be torch's class, which makes a text of its own.
        Exception.__init__(self, text, exit_code)
        self.text = text
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ProcessFailure:
    """The worker that failed first. The fields down to `timestamp` have torch's names and meanings.

    `message` is text, or, for an exception, what `@record` writes: a map with `message` and `extraInfo`. `sentence`
    says which rank failed and how, and `advice` what to do about it, if that is known.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    message: Any
    timestamp: int
    host: str
    sentence: str
    traceback: str = ""
    advice: str = ""


class ChildFailedError(JobFailed):
    """A worker failed, and no restart was left or could help. The text is elaunch's report, with the traceback.

    `failures` has the first failure, by its global rank. Where torch's module of errors is loaded, what is raised is
    also a ChildFailedError of torch's, so that an `except` written for that finds it.
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


def check(told: Mapping[str, Any], code: int, name: str) -> None:
    """Raises what fits, unless the job succeeded. `told` is the job's answer, and empty if it was ended before.

    Raises UsageError, SiteError, ChildFailedError and JobFailed.
    """
    if not told:
        raise JobFailed(
            f"elaunch {_ended(code)} before the outcome of {name} was known; its last lines on stderr may say why",
            128 - code if code < 0 else code,
        )
    if told["outcome"] == UsageError.__name__:
        raise UsageError(told["text"])
    if told["outcome"] == SiteError.__name__:
        raise SiteError(told["text"])
    if told["exit_code"] == 0:
        return
    failure = told.get("failure")
    if failure and "rank" in failure and told["outcome"] == "failed":
        raise child_failed(name, {failure["rank"]: _process_failure(failure)}, told["text"], told["exit_code"])
    raise JobFailed(told["text"].strip(), told["exit_code"])


def _process_failure(failure: Mapping[str, Any]) -> ProcessFailure:
    traceback, timestamp = failure.get("traceback", ""), int(failure["failed_at"])
    message: Any = failure["message"]
    if traceback:
        message = {"message": message, "extraInfo": {"py_callstack": traceback, "timestamp": str(timestamp)}}
    return ProcessFailure(
        local_rank=failure["local_rank"],
        pid=failure["pid"],
        exitcode=failure.get("code", -1),
        error_file=failure.get("error_file", _NOT_AVAILABLE),
        message=message,
        timestamp=timestamp,
        host=failure["host"],
        sentence=failure["sentence"],
        traceback=traceback,
        advice=failure.get("advice", ""),
    )


def _ended(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
