"""Profiles some steps of a training on all ranks: `for step in profiled(steps, "10-12")`, or `Profiler`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from elaunch.trainer.profiling.places import profile_folder, read_mark, write_mark
from elaunch.trainer.profiling.steps import Before, StepWindow, parse_steps, plan
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.ranks.place import RankInfo

if TYPE_CHECKING:
    from elaunch.trainer.profiling.recording import Recording

Item = TypeVar("Item")
Say = Callable[[str], None]


def profiled(
    steps: Iterable[Item],
    which: str | None,
    *,
    folder: str | os.PathLike[str] = "profile",
    flops_per_step: float = 0.0,
    peak_flops: float = 0.0,
    say: Say | None = None,
) -> Iterator[Item]:
    """The items of `steps`, one for each step of a training; the steps in `which` are profiled on the way.

    An item that is a whole number is its step's number, as the Keeper's are; others are counted from 1. `which` is as
    `Profiler` has it; without it this costs nothing.
    """
    if which is None:
        return iter(steps)
    profiler = Profiler(which, folder=folder, flops_per_step=flops_per_step, peak_flops=peak_flops, say=say)
    return _profiled(steps, profiler)


def _profiled(steps: Iterable[Item], profiler: Profiler) -> Iterator[Item]:
    with profiler:
        for count, item in enumerate(steps, 1):
            profiler.begin_step(item if isinstance(item, int) and not isinstance(item, bool) else count)
            yield item


class Profiler:
    """Profiles the steps in `which`: `"3"` three steps as soon as it is warm, `"10-12"` these.

    Call `step` at the end of each step, or `begin_step` with the step's number at its begin. All ranks do the same.
    Each rank's trace goes to the generation's folder in --log-dir, or below `folder`. Rank 0 joins them, and says
    what they show, through `say` (by default to stderr). `flops_per_step` and `peak_flops`, of all devices together,
    make the MFU. Nothing of it can end a training: what cannot be written is said. Raises ValueError for a `which`
    that makes no sense.
    """

    def __init__(
        self,
        which: str,
        *,
        folder: str | os.PathLike[str] = "profile",
        flops_per_step: float = 0.0,
        peak_flops: float = 0.0,
        say: Say | None = None,
    ) -> None:
        self._choice, self._folder = parse_steps(which), Path(folder)
        self._costs = {"flops_per_step": flops_per_step, "peak_flops": peak_flops}
        self._say = say or _to_stderr
        self._place = RankInfo.from_environ(os.environ)
        self._window: StepWindow | None = None
        self._recording: Recording | None = None
        # The next step, if `step` counts: its first call ends step 1.
        self._next = 2
        self._planned = False
        self._recorded = 0
        self._sentences: list[str] = []
        self._said_step = -1

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
        elif self._recording is not None:
            # After an error the other ranks may be gone: the profiler waits for the GPU, and that may wait for them.
            if isinstance(error, SystemExit | GeneratorExit) and not sys.is_finalizing():
                self._recording.abandon()
            if self._leads and not isinstance(error, GeneratorExit):
                self._say(f"profile: no trace, since the training stopped while {self._window} were profiled")
        self._recording = None

    def step(self) -> None:
        """A step has ended. The first call ends step 1."""
        self.begin_step(self._next)

    def begin_step(self, number: int) -> None:
        """Step `number` begins, and the one before has ended."""
        self._next = number + 1
        if not self._planned:
            self._plan(number)
        window = self._window
        if window is None:
            return
        if self._recording is not None:
            if number > window.last:
                self._finish(number)
                return
            self._recording.next_step()
            self._recorded += 1
        elif number == window.first - 1:
            self._begin()

    def _plan(self, number: int) -> None:
        """Decide which steps are profiled: rank 0 does, for it alone may know of an earlier generation. Collective."""
        self._planned = True
        self._ranks = Peers().apart("profile")
        self._leads = self._ranks.leads
        found = None
        if self._leads:
            before, sentences = read_mark(os.environ)
            found = plan(self._choice, number, before), sentences
        made, self._sentences = self._ranks.from_rank_0(found)
        self._window = made.window
        if made.sentence and self._leads:
            self._say(f"profile: {made.sentence}")

    def _begin(self) -> None:
        # Imported here, since a restart waits for imports, and most runs are not profiled.
        from elaunch.trainer.profiling.recording import Recording

        assert self._window is not None
        if self._leads:
            write_mark(os.environ, Before.BEGUN, [])
        self._recording = Recording(self._window.count)
        self._recording.begin()

    def _finish(self, number: int) -> None:
        """All profiled steps have ended. Collective."""
        from elaunch.trainer.profiling.report import collect, report

        recording, window = self._recording, self._window
        assert recording is not None
        assert window is not None
        self._recording = self._window = None
        window = StepWindow(window.first, window.first + self._recorded - 1)
        folder = profile_folder(os.environ, self._place.generation, self._folder)
        mine = collect(recording, folder, self._ranks.rank, window.first)
        self._sentences, troubles = report(self._ranks, mine, folder, self._place.generation, **self._costs)
        if self._leads:
            write_mark(os.environ, Before.DONE, self._sentences)
            self._tell([*self._sentences, *troubles])
        self._said_step = number

    def _tell(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self._say(f"profile: {sentence}")

    def _end(self) -> None:
        """The last step has ended."""
        if self._recording is not None and self._recorded:
            self._finish(self._next)
        elif self._window is not None:
            if self._recording is not None:
                self._recording.abandon()
            if self._leads:
                self._say(f"profile: the training ended before {self._window} were profiled")
        elif self._sentences and self._leads and self._said_step < self._next - 1:
            # Once more, since the log has grown.
            self._tell(self._sentences)
        if self._planned:
            self._ranks.close()


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
