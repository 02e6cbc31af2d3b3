"""The report at the end of a run: which rank failed first, how, and where its log is."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elaunch.agent.core.timeline import of_outcome
from elaunch.agent.diagnosis.exit_status import CRASH_CODES, chain_start
from elaunch.agent.linux import normal_path
from elaunch.agent.workers.exits import read_error_file, signal_name
from elaunch.rendezvous.format import plain
from elaunch.rendezvous.types import Failure, FailureKind, JobSpec, Outcome, OutcomeKind
from elaunch.strict_json import parse_json

_TAIL_LINES = 20
# The exit code of a wrong command line, and the most lines of such an error without a usage text.
_USAGE_CODE, _USAGE_LINES = 2, 3
# Lines that are shown from each end of a traceback. A longer one comes from a recursion, or has a long message.
_TRACEBACK_LINES = 60
_LINE_CHARACTERS = 1000
_FRAME = re.compile(r'(?<=^  File ")[^"]+')
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_HEAVY, _LIGHT = "=" * 72, "-" * 72


def report(outcome: Outcome, spec: JobSpec, logs: Path | None, is_incomplete: bool = False) -> str:
    """The text at the end of a run; empty after a success without restarts and with all its output.

    The log's first line has named `logs`. `is_incomplete`: part of the output is missing there.
    """
    lacks = ", incomplete: some of it could not be written" if is_incomplete else ""
    where = f"elaunch: the workers' output is in {logs}{lacks}\n" if logs and lacks else ""
    page = f"elaunch: the run as a page: elaunch report {shlex.quote(str(logs))}\n" if logs and not lacks else ""
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            return (f"elaunch: succeeded, {_restarts(outcome)}\n" if outcome.restarts else "") + where
        case OutcomeKind.INTERRUPTED:
            return f"elaunch: stopped, since {outcome.reason}; exit code {outcome.exit_code}\n{where}"
        case OutcomeKind.REFUSED:
            return f"elaunch: {outcome.reason}\n"
        case OutcomeKind.UNKNOWN:
            return f"elaunch: {outcome.reason}; exit code {outcome.exit_code}\n{where}{page}"
        case OutcomeKind.FAILED:
            return _failed(outcome, spec, logs, lacks) + page


def record(outcome: Outcome, logs: Path | None) -> dict[str, object]:
    """The report as one object, for `--log-format json`."""
    known = {"logs": str(logs)} if logs else {}
    return {"generation": outcome.generation, **known, **of_outcome(outcome)}


def write_error_file(outcome: Outcome, path: str | None, own: Callable[[int, int], Path | None]) -> None:
    """Write the failure that ended the job to `path` for the program that started elaunch: its record with `errorCode`.

    The format is that of torch's `@record`. `own` finds the error file of a rank of this host in a generation, if the
    failure does not name it.
    """
    failure = outcome.failure
    if not path or failure is None:
        return
    text = ""
    # The path comes from another agent: on this host it may be a pipe. JSON that was read may be nested too deeply
    # to be written.
    with suppress(OSError, ValueError, TypeError, RecursionError):
        theirs = failure.error_file or own(failure.generation, failure.rank)
        if theirs and (recorded := read_error_file(theirs)):
            text = _record_with_code(dict(parse_json(recorded)), failure)
    text = text or _record_with_code({}, failure)
    with suppress(OSError):
        write_whole(Path(path), text, 0o666)


def write_whole(path: Path, text: str, mode: int = 0o640) -> None:
    """Write a file whole or not at all, by default with the mode of log files. Raises OSError."""
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    # With O_EXCL no file that exists already in another user's folder is written to.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _record_with_code(recorded: dict[str, object], failure: Failure) -> str:
    message = recorded.get("message")
    if not isinstance(message, dict):
        stack = {"py_callstack": failure.traceback, "timestamp": str(int(failure.failed_at))}
        message = {"message": failure.sentence, "extraInfo": stack}
    advice = {"advice": failure.advice} if failure.advice else {}
    return json.dumps({**recorded, "message": {**message, "errorCode": failure.code, **advice}})


def _failed(outcome: Outcome, spec: JobSpec, logs: Path | None, lacks: str) -> str:
    """torchrun's box, whose text scripts grep for, with the reason for the exit above it."""
    failure = outcome.failure
    if failure and outcome.restarts == 0 and (usage := _wrong_arguments(failure)):
        head = f"elaunch: {spec.program.target} FAILED on {failure.host}: rank {failure.rank} {usage}"
        next_step = f"Next step: {failure.advice}.\n" if failure.advice else ""
        log = f"elaunch: its output is in {failure.log_path}\n" if failure.log_path else ""
        return f"{head}; exit code {outcome.exit_code}\n{next_step}{log}"
    lines = [_HEAVY, f"{spec.program.target} FAILED"]
    first = outcome.first
    if not (failure or first):
        return "\n".join([*lines, f"{outcome.reason}.", _HEAVY, ""])
    lines += [f"{first.sentence_of_first}."] if first else []
    lines += [f"{failure.sentence}."] if failure else []
    lines.append(f"Why it stopped: {outcome.reason}{'' if spec.max_restarts == 0 else f'; {_restarts(outcome)}'}.")
    failures = [each for each in (first, failure) if each]
    advised = {each.advice: each.generation for each in reversed(failures) if each.advice}
    for advice, generation in reversed(advised.items()):
        of_which = f" (generation {generation})" if len(advised) > 1 else ""
        lines.append(f"Next step{of_which}: {advice}.")
    titles = ("Root Cause (first observed failure):", "What ended the job (last failure):")
    for number, (title, each) in enumerate(zip(titles, failures, strict=False)):
        lines += [_LIGHT, title, f"[{number}]:", *_details(each, logs, lacks)]
    return "\n".join([*lines, _HEAVY, ""])


def _details(failure: Failure, logs: Path | None, lacks: str) -> list[str]:
    code, recorded = failure.code, failure.error_file or failure.log_path
    pid = f" (pid: {failure.pid})" if failure.pid > 0 else ""
    name = f"  ({signal_name(code)})" if code is not None and code < 0 else ""
    lines = [
        f"  time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(failure.failed_at))}",
        f"  host      : {failure.host}",
        *([f"  rank      : {failure.rank} (local_rank: {failure.local_rank})"] if failure.rank >= 0 else []),
        f"  exitcode  : {'<N/A>' if code is None else f'{code}{pid}{name}'}",
        f"  error_file: {failure.error_file if logs and failure.error_file else '<N/A>'}",
    ]
    if failure.traceback:
        lines += ["  traceback :", *_indented(failure.traceback)]
    if failure.is_cut:
        # It was too long for the store, and is on the failed worker's node only.
        here = f"in the output of elaunch on {failure.host}; --log-dir FOLDER keeps it in a file"
        lines.append(f"  in full   : {f'{recorded} on {failure.host}' if logs and recorded else here}")
    if tail := _tail(failure):
        shown = "its last line" if len(tail) == 1 else f"its last {len(tail)} lines"
        shown = shown if failure.rank >= 0 else "what ranks wrote last"
        stream = "output" if failure.is_mixed else "stderr"
        lines += [f"  {stream}    : {shown}", *(f"    {_shown(line)}" for line in tail)]
    if failure.log_path or logs:
        lines.append(f"  log       : {failure.log_path or logs}{lacks}")
    return lines


def _wrong_arguments(failure: Failure) -> str:
    """The program's error about its own arguments, in one line; empty if it ended for another reason.

    The console shows the same, and no other detail of the failure is useful: rank, time or process.
    """
    if failure.kind is FailureKind.REFUSED:
        return failure.message
    is_usage = failure.kind is FailureKind.STARTUP and failure.code == _USAGE_CODE and not failure.exception
    lines = _tail(failure) if is_usage else []
    # A program with more output has begun its work. The usage of argparse stands above its last line.
    if not lines or (len(lines) > _USAGE_LINES and not failure.advice):
        return ""
    last = _shown(lines[-1].strip()).rstrip(".")
    is_repeated = last.endswith(failure.message.rpartition("; ")[2].removesuffix(")").rstrip("."))
    return failure.message if is_repeated else f"{failure.message}: {last}"


def _tail(failure: Failure) -> list[str]:
    """The end of stderr, without the traceback that the report shows above."""
    text = failure.tail
    if failure.traceback:
        # The lines before the traceback are about what happened before the failure.
        start = chain_start(text)
        if start < 0 or failure.code in CRASH_CODES:
            start = text.rfind(failure.traceback)
        text = text[:start] if start >= 0 else text
    # Keep only the last state of a progress bar.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return [line for line in lines if line][-_TAIL_LINES:]


def _indented(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    hidden = lines[_TRACEBACK_LINES:-_TRACEBACK_LINES]
    if hidden:
        middle = f"… {len(hidden)} lines are not shown here …"
        lines = [*lines[:_TRACEBACK_LINES], middle, *lines[-_TRACEBACK_LINES:]]
    return [f"    {_shown(_FRAME.sub(lambda found: normal_path(found[0]), line))}" for line in lines]


def _shown(line: str) -> str:
    """The line without colours and other control characters, cut if it is very long."""
    line = plain(_COLOUR.sub("", line), keep="\t")
    more = len(line) - _LINE_CHARACTERS
    return line if more <= 0 else f"{line[:_LINE_CHARACTERS]}… ({more:,} more characters)"


def _restarts(outcome: Outcome) -> str:
    return f"{outcome.restarts} of {outcome.max_restarts} restarts used"
