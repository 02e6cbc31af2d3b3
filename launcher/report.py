"""What the user reads at the end: who failed first, how, and what to look at."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from elaunch.agent.failures import chain_start
from elaunch.rendezvous.codec import parse_json
from elaunch.rendezvous.types import Failure, JobSpec, Outcome, OutcomeKind

_TAIL_LINES = 20
_HEAVY, _LIGHT = "=" * 72, "-" * 72


def report(outcome: Outcome, spec: JobSpec, logs: Path | None, is_incomplete: bool = False) -> str:
    """The last words of a run; nothing for a plain success. `is_incomplete` says that `logs` lack something."""
    lacks = ", incomplete: not all could be written" if is_incomplete else ""
    where = f"elaunch: the workers' output is in {logs}{lacks}\n" if logs else ""
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            used = f"elaunch: succeeded, {_restarts(outcome)}\n" if outcome.restarts else ""
            return used + where
        case OutcomeKind.INTERRUPTED:
            return f"elaunch: stopped, since {outcome.reason}; exit code {outcome.exit_code}\n{where}"
        case OutcomeKind.REFUSED:
            return f"elaunch: {outcome.reason}\n"
        case OutcomeKind.UNKNOWN:
            return f"elaunch: {outcome.reason}; exit code {outcome.exit_code}\n{where}"
        case OutcomeKind.FAILED:
            return _failed(outcome, spec, logs, lacks)


def write_error_file(outcome: Outcome, path: str | None) -> None:
    """Hand the first failure on to whoever launched us, as torch's `@record` does: its record with `errorCode`."""
    failure = outcome.failure
    if not path or failure is None:
        return
    text = ""
    # The path is another agent's word: it may be a pipe here. What can be read may be nested too deeply to be written.
    with suppress(OSError, ValueError, TypeError, RecursionError):
        if (file := Path(failure.error_file)).is_file():
            text = _record_with_code(dict(parse_json(file.read_bytes())), failure)
    text = text or _record_with_code({}, failure)
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(target)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def _record_with_code(record: dict[str, object], failure: Failure) -> str:
    message = record.get("message")
    if not isinstance(message, dict):
        stack = {"py_callstack": failure.traceback, "timestamp": str(int(failure.failed_at))}
        message = {"message": failure.sentence, "extraInfo": stack}
    return json.dumps({**record, "message": {**message, "errorCode": failure.code}})


def _failed(outcome: Outcome, spec: JobSpec, logs: Path | None, lacks: str) -> str:
    """torchrun's box, which scripts look for by its words, with the story on top."""
    failure = outcome.failure
    lines = [_HEAVY, f"{spec.program.target} FAILED"]
    if failure is None:
        return "\n".join([*lines, f"{outcome.reason}.", _HEAVY, ""])
    lines += [
        f"{failure.sentence}.",
        f"Why it stopped: {outcome.reason}{'' if spec.max_restarts == 0 else f'; {_restarts(outcome)}'}.",
        _LIGHT,
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(failure.failed_at))}",
        f"  host      : {failure.host}",
        f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {_exit_code(failure)}",
        f"  error_file: {failure.error_file if logs and failure.error_file else '<N/A>'}",
    ]
    if failure.traceback:
        lines += ["  traceback :", *_indented(failure.traceback)]
    if tail := _tail(failure):
        shown = "its last line" if len(tail) == 1 else f"its last {len(tail)} lines"
        lines += [f"  stderr    : {shown}", *(f"    {line}" for line in tail)]
    if failure.log_path or logs:
        lines.append(f"  log       : {failure.log_path or logs}{lacks}")
    return "\n".join([*lines, _HEAVY, ""])


def _exit_code(failure: Failure) -> str:
    if failure.code is None:
        return "<N/A>"
    name = ""
    if failure.code < 0:
        with suppress(ValueError):
            name = f"  ({signal.Signals(-failure.code).name})"
    return f"{failure.code} (pid: {failure.pid}){name}"


def _tail(failure: Failure) -> list[str]:
    """The end of stderr, without the traceback that is shown already."""
    text = failure.tail
    if failure.traceback:
        # The lines before what Python printed of it say what led there.
        start = chain_start(text)
        if start < 0:
            start = text.rfind(failure.traceback)
        text = text[:start] if start >= 0 else text
    # Of a progress bar, its last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return [line for line in lines if line][-_TAIL_LINES:]


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.rstrip().splitlines()]


def _restarts(outcome: Outcome) -> str:
    return f"{outcome.restarts} of {outcome.max_restarts} restarts used"
