"""torch.profiler around the profiled steps of this process."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "6"


class Recording:
    """A trace of `steps` steps. `begin` is called before the step in which the profiler warms up."""

    def __init__(self, steps: int) -> None:
        self._trouble = ""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            # Without a handler it would print a table.
            on_trace_ready=lambda _: None,
            # Sizes of what is sent come from the shapes.
            record_shapes=True,
        )

    def begin(self) -> None:
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
            # Only one can be active: ours would end the program's own.
            self._trouble = "the program uses torch.profiler itself in these steps"
        with _quiet():
            self._try(self._profile.start)

    def next_step(self) -> None:
        """A step has ended, and another begins."""
        self._try(self._profile.step)

    def abandon(self) -> None:
        """No step was recorded, and none will be."""
        self._try(self._profile.stop)

    def end(self) -> bytes:
        """The trace, as kineto writes it. Raises OSError or RuntimeError.

        The file is made in the job's shared memory, so that a full disk costs the file and not the summary.
        """
        self._try(self._profile.stop)
        if self._trouble:
            raise RuntimeError(self._trouble)
        with tempfile.TemporaryDirectory(prefix="profile-", dir=_scratch()) as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return path.read_bytes()

    def _try(self, call: Callable[[], object]) -> None:
        """The training goes on without a trace, as where the program profiles itself already."""
        if self._trouble:
            return
        try:
            call()
        except (RuntimeError, AssertionError) as error:
            self._trouble = f"torch.profiler failed: {str(error).partition(chr(10))[0]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """kineto tells each stage on stderr, if nobody wants it otherwise. It reads the level when it is first used.

    On a GPU it may have something to say: that this user may not look at it.
    """
    if _LEVEL in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[_LEVEL] = _NOTHING
    try:
        yield
    finally:
        del os.environ[_LEVEL]


def _scratch() -> str | None:
    memory = os.environ.get("ELAUNCH_MEMORY")
    return memory if memory and os.access(memory, os.W_OK) else None
