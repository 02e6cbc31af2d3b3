"""Trainings by kept.py with the records of their workers, and the same trainings without failures."""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.harness import Job, preloading
from tests.ranks import Ended, RankForker, Ranks
from tests.warm import SharedStart

KEPT = Path(__file__).with_name("kept.py")
PRELOAD = preloading("elaunch.trainer.keeper.keeper")
STEPS = 40
RESTORED = r"restored step (\d+) from memory \(of generation (\d+)(.*?)\); (\d+) steps? (?:is|are) repeated"


class Recorded:
    """What the workers of a training have recorded in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "records"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, event: str, **fields: object) -> list[dict[str, Any]]:
        return [r for r in self.records if r["event"] == event and fields.items() <= r.items()]

    def began(self, generation: int) -> int:
        """The step after which that generation went on."""
        (step,) = {r["step"] for r in self.of("began", generation=generation)}
        return int(step)


def once(place: Path, make: Callable[[Path], None]) -> Path:
    """The folder `place`, which `make` fills unless another test, or another test process, has done so."""
    with Path(f"{place}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            partial = Path(f"{place}.part")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(place)
    return place


def run_calmly(forker: RankForker, workers: int, *words: str | Path) -> None:
    """Run a program to its end without an agent and without a memory: neither changes the result of a run."""
    program, *args = words
    with Ranks(forker, workers, Path(program), *map(str, args), env={"ELAUNCH_GENERATION": "0"}) as ranks:
        ended = ranks.end(500.0)
    assert [rank.code for rank in ended] == [0] * workers, ended


class Kept(Recorded):
    """What the workers of kept.py have recorded."""

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        """The bits of each rank's loss of each step. Fails if a loss was computed twice with different results."""
        found: dict[tuple[int, int], str] = {}
        for r in self.of("done"):
            assert found.setdefault((r["rank"], r["step"]), r["loss"]) == r["loss"], r
        return found

    @property
    def ends(self) -> dict[int, tuple[str, str]]:
        """Each rank's state at the end: model, optimizer, scheduler, extra, its own random state and error feedback."""
        return {r["rank"]: (r["state"], r["own"]) for r in self.of("end")}

    def newest_done(self, generation: int) -> int:
        """The newest step that a worker of that generation has recorded as done."""
        done = [*self.of("done", generation=generation), *self.of("began", generation=generation)]
        return max(r["step"] for r in done)


class Run(Kept):
    """One training by `kept.py` with what its workers recorded; `asks` are pairs of a moment and its place."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        *options: str,
        asks: Iterable[str] = (),
        steps: int = STEPS,
        launch: Iterable[str] = (),
        shared: SharedStart | None = None,
    ) -> None:
        super().__init__(folder)
        self._shared = shared
        folder.mkdir()
        for ask in asks:
            (folder / ask).touch()
        self.start(workers, *options, steps=steps, launch=launch)

    def start(self, workers: int, *options: str, steps: int = STEPS, launch: Iterable[str] = ()) -> None:
        """Type the command, for the first time or again. `launch` are options of elaunch."""
        start, env = (self._shared.options, self._shared.env) if self._shared else (PRELOAD, {"OMP_NUM_THREADS": "1"})
        # The default is 2 s to begin to save. A busy machine may need longer.
        words = [*start, "--nproc-per-node", str(workers), "--max-restarts", "30", "--failure-grace", "60", *launch]
        program = (str(KEPT), str(self.folder), str(steps))
        self.job = Job(self.folder, *words, *program, *options, env=env)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()

    def ended(self) -> Run:
        assert self.job.wait(500) == 0, self.job.output
        return self


class Forked(Kept):
    """A training by `kept.py` whose ranks are forked without an agent, with one memory for all generations.

    Use it as a context manager, so that no memory is left. `asks` are pairs of a moment and its place.
    """

    def __init__(self, folder: Path, forker: RankForker, *options: str, asks: Iterable[str] = ()) -> None:
        super().__init__(folder)
        folder.mkdir()
        for ask in asks:
            (folder / ask).touch()
        self._forker, self._options = forker, options
        self._memory = tempfile.TemporaryDirectory(dir="/dev/shm")

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.cleanup()

    def generation(self, number: int, workers: int) -> list[Ended]:
        """Run that generation. Returns how each of its ranks ended."""
        env = {"ELAUNCH_GENERATION": str(number), "ELAUNCH_MEMORY": self._memory.name}
        with Ranks(self._forker, workers, KEPT, str(self.folder), str(STEPS), *self._options, env=env) as ranks:
            return ranks.end()


class Calm:
    """The runs without failures, each made when a test first needs it. All test processes share `folder`."""

    def __init__(self, forker: RankForker, folder: Path) -> None:
        self._forker, self._folder = forker, folder
        folder.mkdir(exist_ok=True)

    def __call__(self, workers: int, option: str = "") -> Kept:
        def make(folder: Path) -> None:
            folder.mkdir()
            run_calmly(self._forker, workers, KEPT, folder, str(STEPS), *([option] if option else []))

        return Kept(once(self._folder / f"{workers}-{option or 'plain'}", make))


def assert_same(stormy: Kept, calm: Kept) -> None:
    assert stormy.ends == calm.ends
    assert calm.losses.items() >= stormy.losses.items()
    # Only killed ranks lack lines of steps that the others had completed. A generation's last step may have no line at
    # all: one rank died in its commit, and the agent ended the other, which had saved it, before its line.
    missing = set(range(1, STEPS + 1)) - {step for _, step in stormy.losses}
    assert missing <= {r["step"] for r in stormy.of("began")}
