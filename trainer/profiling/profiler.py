"""Profiles some steps of a training on all ranks: `for step in profiled(steps, "10-12")`."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from elaunch.trainer import link
from elaunch.trainer.files import reason, write_durably
from elaunch.trainer.profiling.traces import (
    StepTimes,
    StepWindow,
    parse_steps,
    parsed,
    record,
    step_times,
    table,
    window_of,
)
from elaunch.trainer.ranks import RankInfo
from elaunch.trainer.ranks.peers import Peers

Item = TypeVar("Item")
Log = Callable[[str], None]
RECORD = "profile.json"
# A folder of --log-dir has this file; the private folder of a job without --log-dir is removed with the job.
_TIMELINE = "timeline.jsonl"
_TROUBLES_MAX = 8


def profiled(
    steps: Iterable[Item], which: str | None, *, folder: str | os.PathLike[str] = "profile", log: Log | None = None
) -> Iterator[Item]:
    """The items of `steps`, one for each step of a training; those in `which` are profiled.

    An int item is its step's number, as the Keeper's are; others are counted from 1. `which` is `"3"` for three steps
    after the warm-up, `"10-12"` for these; without it this costs nothing. All ranks must profile the same steps. Each
    rank's trace goes to the generation's folder in --log-dir, or below `folder`. Rank 0 passes their table to `log` (by
    default to stderr). No error of it ends a training. Raises ValueError for an invalid `which`.
    """
    if which is None:
        return iter(steps)
    # An invalid `which` is rejected here, not at the first step.
    return _profiled(steps, Profiler(which, folder=folder, log=log))


def _profiled(steps: Iterable[Item], profiler: Profiler) -> Iterator[Item]:
    with profiler:
        for count, item in enumerate(steps, 1):
            profiler.begin_step(item if isinstance(item, int) and not isinstance(item, bool) else count)
            yield item


class Profiler:
    """The profiler of a loop, which calls `begin_step` with each step's number."""

    def __init__(self, which: str, *, folder: str | os.PathLike[str], log: Log | None = None) -> None:
        self._choice, self._folder = parse_steps(which), Path(folder)
        self._place = RankInfo.from_environ(os.environ)
        self._log = (log or partial(print, file=sys.stderr, flush=True)) if self._place.leads else lambda _: None
        self._window: StepWindow | None = None
        self._profile: Any = None
        self._trouble = ""
        # The step that has begun.
        self._current = 0
        self._is_planned = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._window is None or (self._profile is None and error is not None):
            return
        if self._profile is not None and error is None and self._current >= self._window.first:
            self._finish(self._current)
            return
        # After any other error ranks may be gone: stopping waits for the GPU, which may wait for their collectives.
        if self._profile is not None and isinstance(error, SystemExit | GeneratorExit | None):
            self._try(self._profile.stop)
        self._log(f"profile: no trace, since the training ended before {self._window} were profiled")

    def begin_step(self, number: int) -> None:
        """Begin step `number`, and end the previous one."""
        if not self._is_planned:
            self._is_planned = True
            self._window = window_of(self._choice, number)
            if isinstance(self._choice, StepWindow) and self._window != self._choice:
                left = self._window or "nothing"
                self._log(f"profile: this start begins with step {number}; it profiles {left} of {self._choice}")
        window, ended, self._current = self._window, self._current, number
        if window is None:
            return
        if self._profile is None:
            if number == window.first - 1:
                self._begin(window)
        elif number > window.last:
            self._finish(ended)
        else:
            self._try(self._profile.step)

    def _begin(self, window: StepWindow) -> None:
        has_gpu = torch.cuda.is_available()
        if not has_gpu:
            # Else kineto logs each stage to stderr. On a GPU it may log that CUPTI lacks permissions.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
            # Only one can be active: ours would stop the program's own.
            self._trouble = "the program uses torch.profiler itself in these steps"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * has_gpu],
            schedule=schedule(wait=0, warmup=1, active=window.count, repeat=1),
            # Without a handler it would print a table.
            on_trace_ready=lambda _: None,
        )
        self._try(self._profile.start)

    def _try(self, call: Callable[[], object]) -> None:
        """Run `call`, unless one has failed."""
        if self._trouble:
            return
        try:
            call()
        except (RuntimeError, AssertionError) as error:
            self._trouble = f"torch.profiler failed: {reason(error)}"

    def _finish(self, last: int) -> None:
        """Stop profiling and log the table. Collective."""
        assert self._window is not None
        window, self._window = StepWindow(self._window.first, last), None
        folder = profile_folder(os.environ, self._place.generation, self._folder)
        link.phase("profiling")
        ranks = Peers().apart("profile")
        try:
            found = ranks.gather(self._collected(window, folder))
        finally:
            ranks.close()
        if found is not None:
            for line in _written(found, folder, self._place.generation):
                self._log(f"profile: {line}")

    def _collected(self, window: StepWindow, folder: Path) -> _Collected:
        """Stop the recording, write this rank's trace, read its times."""
        self._try(self._profile.stop)
        rank = self._place.rank
        try:
            if self._trouble:
                raise RuntimeError(self._trouble)
            content = _exported(self._profile)
            times, on_gpu = step_times(parsed(content), rank, window.first)
        except (OSError, RuntimeError, ValueError) as error:
            return _Collected(f"rank {rank} has no trace: {reason(error)}")
        trouble = _write(folder / f"rank_{rank}.json.gz", gzip.compress(content, 6))
        return _Collected(trouble, tuple(times), on_gpu)


@dataclass(frozen=True)
class _Collected:
    """One rank's recording; `trouble` is why a part is missing."""

    trouble: str
    times: tuple[StepTimes, ...] = ()
    on_gpu: bool = False


def _exported(profile: Any) -> bytes:
    """kineto's trace, by way of the job's shared memory: a full disk costs the file, not the table."""
    with tempfile.TemporaryDirectory(prefix="profile-", dir=os.environ.get("ELAUNCH_MEMORY")) as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return path.read_bytes()


def _written(found: Sequence[_Collected], folder: Path, generation: int) -> list[str]:
    """Write profile.json on rank 0. Returns the table and the errors."""
    times = [each for one in found for each in one.times]
    lines, troubles = table(times), [each.trouble for each in found if each.trouble]
    made = record(times, lines, generation=generation, on_gpu=any(one.on_gpu for one in found))
    if trouble := _write(folder / RECORD, json.dumps(made, indent=1).encode() + b"\n"):
        troubles.append(trouble)
    command = shlex.join(["python", "-m", "elaunch.trainer.profiling", str(folder.absolute())])
    joining = [f"for https://ui.perfetto.dev join the ranks' traces: {command}"] if times else []
    return [*lines, *joining, *troubles[:_TROUBLES_MAX]]


def _write(path: Path, content: bytes) -> str:
    """Write a file atomically. Returns the error, or "" without one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
    except OSError as error:
        return f"{path} cannot be written ({reason(error)})"
    return ""


def profile_folder(environ: Mapping[str, str], generation: int, otherwise: Path) -> Path:
    """The folder for this rank's files: in the generation's log folder, or with no --log-dir below `otherwise`.

    elaunch gives workers a file for their exception: <run>/attempt_<generation>/<rank>/error.json.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    attempt = Path(error_file).parent.parent
    if error_file and attempt.name.startswith("attempt_") and (attempt.parent / _TIMELINE).is_file():
        return attempt / "profile"
    return otherwise / f"generation_{generation}"
