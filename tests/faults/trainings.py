"""Runs of the bundled trainer with failures at named moments, and the checks on their results."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elaunch.trainer.ledger.ledger import audit_folder
from tests.faults.keeper_runs import Recorded, once, run_calmly
from tests.faults.processes import Watched
from tests.harness import DEADLINE_S as WAIT_S
from tests.harness import preloading, wait_for
from tests.ranks import Ended, RankForker, Ranks

PROGRAM = Path(__file__).with_name("killing_trainer.py")
STEPS, BATCH = 40, 12
PRELOAD = preloading("elaunch.trainer.train")
SHAPE = ["--steps", str(STEPS), "--global-batch", str(BATCH), "--micro-batch", "2", "--layers", "1", "--width", "16"]
SHAPE += ["--heads", "2", "--context", "16", "--dropout", "0.1", "--seed", "5", "--checkpoint-every", "10", "--ledger"]
# At the default learning rate training amplifies rounding differences, such as those of a resized run.
GENTLE = ("--lr", "3e-4")
RESTORED = r"restored step (\d+) from (memory|the checkpoint) .*; (\d+) steps? (?:is|are) repeated"
DEADLINE_S = 500.0


class Trained(Recorded):
    """The records and results of one run in `folder`, which all its workers see."""

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        """The run directory is on `disk`, if that is given."""
        super().__init__(folder)
        self.out = (disk or folder) / "out"

    def wait_for(self, event: str, *, deadline_s: float = WAIT_S, **fields: object) -> None:
        wait_for(lambda: self.of(event, **fields), f"{event} {fields}", deadline_s)

    def struck(self, event: str = "killed") -> list[str]:
        """The files of the moments that have struck, in order."""
        return [f"{r['moment']}-{r['generation']}-{r['step']}-{r['rank']}" for r in self.of(event)]

    @property
    def result(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return answer

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines}

    def assert_complete(self, *, lost: int = 0, steps: int = STEPS) -> None:
        """Check that every step is there once, exactly `lost` steps were done twice, and each sample was seen once."""
        assert [line["step"] for line in self.lines] == list(range(1, steps + 1))
        result = self.result
        assert (result["steps_lost"], result["steps_repeated"]) == (lost, lost)
        assert result["samples_seen"] == steps * BATCH
        verdict = audit_folder(self.out / "ledger", steps=steps)
        assert verdict.ok, verdict.text
        assert verdict.lost_steps == lost
        assert result["ledger"] == verdict.text

    def assert_same(self, calm: Trained) -> None:
        """Check that the result is bit for bit that of the run without failures."""
        assert self.losses == calm.losses
        assert self.result["params_sha256"] == calm.result["params_sha256"]
        assert self.result["held_out_loss"] == calm.result["held_out_loss"]

    def difference(self, calm: Trained) -> float:
        """The largest relative difference between a loss of this run and that of the same step in the other one."""
        return max(abs(loss - calm.losses[step]) / loss for step, loss in self.losses.items())

    def assert_no_memory_is_left(self) -> None:
        """Check that the run has left nothing in shared memory."""
        folders = {Path(r["memory"]) for r in self.of("began") if r["memory"]}
        assert folders
        assert not [folder for folder in folders if folder.exists()]


class Training(Trained):
    """One run with the moments that the test asks for, and its results."""

    def __init__(self, folder: Path, asks: Iterable[str] = (), disk: Path | None = None) -> None:
        """`asks` are names of moments' files (moments.py); `hold:` before one says what it does."""
        super().__init__(folder, disk)
        folder.mkdir()
        (folder / "text.txt").write_text("".join(chr(97 + i * i % 26) for i in range(40_000)))
        for ask in asks:
            self.ask(ask)

    def ask(self, ask: str) -> None:
        what, _, name = ask.rpartition(":")
        # Make each file whole before it gets its name: a worker must not read a file that is still empty.
        partial = self.folder / f".{name}"
        partial.write_text(what)
        partial.rename(self.folder / name)

    def release(self, name: str) -> None:
        """Let the rank go on that is held at that moment."""
        (self.folder / name).unlink()

    def words(self, *options: str) -> list[str]:
        """The command from the program on."""
        text = str(self.folder / "text.txt")
        return [str(PROGRAM), str(self.folder), "--out", str(self.out), "--data", text, *SHAPE, *options]


class OneNode(Training):
    """A run by one agent with `workers` workers; use it as a context manager, so that nothing outlives the test."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        *options: str,
        asks: Iterable[str] = (),
        launch: str = "",
        disk: Path | None = None,
    ) -> None:
        super().__init__(folder, asks, disk)
        self.start(workers, *options, launch=launch)

    def start(self, workers: int, *options: str, launch: str = "") -> None:
        """Type the command, for the first time or again; `launch` are options of elaunch."""
        words = [*PRELOAD, "--nproc-per-node", str(workers), "--max-restarts", "30", *launch.split()]
        self.job = Watched(self.folder, *words, *self.words(*options), env={"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> OneNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()

    def ended(self, code: int = 0, deadline_s: float = DEADLINE_S) -> OneNode:
        """Wait for the run's end. It must leave nothing."""
        assert self.job.wait(deadline_s) == code, self.job.output
        self.job.assert_nothing_is_left()
        self.assert_no_memory_is_left()
        return self


class Forked(Training):
    """A run whose ranks are forked without an agent, one generation after the other, with one memory for all of them.

    Use it as a context manager, so that no memory is left.
    """

    def __init__(self, folder: Path, forker: RankForker, asks: Iterable[str] = ()) -> None:
        super().__init__(folder, asks)
        self._forker = forker
        self._memory = tempfile.TemporaryDirectory(dir="/dev/shm")

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.cleanup()

    def generation(self, number: int, workers: int, *options: str) -> list[Ended]:
        """Run that generation. Returns how each of its ranks ended."""
        env = {"ELAUNCH_GENERATION": str(number), "ELAUNCH_MEMORY": self._memory.name}
        with Ranks(self._forker, workers, PROGRAM, *self.words(*options)[1:], env=env) as ranks:
            return ranks.end(DEADLINE_S)


class CalmTrainings:
    """The runs without failures, each made when a test first needs it. All test processes share `folder`."""

    def __init__(self, forker: RankForker, folder: Path) -> None:
        self._forker, self._folder = forker, folder
        folder.mkdir(exist_ok=True)

    def __call__(self, workers: int, *options: str, steps: int = STEPS) -> Trained:
        def make(folder: Path) -> None:
            run = Training(folder)
            run_calmly(self._forker, workers, *run.words(*options))
            run.assert_complete(steps=steps)

        return Trained(once(self._folder / "".join((str(workers), *options)), make))
