"""A training run under hundreds of kills ends as the run that never failed does, and nothing adds up meanwhile."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.census import Census, alive, cgroups_named, shared_memory_of
from tests.faults.processes import Watched
from tests.faults.storm import Storm, seeded

# Every process of a test run collects this file, and needs no torch for that.
if TYPE_CHECKING:
    import torch

Calm = Callable[[int, int], Path]

# Each test has a short form: -m slow -k short.
pytestmark = pytest.mark.slow

SHAPE = ["--global-batch", "12", "--checkpoint-every", "4", "--layers", "1", "--width", "16", "--heads", "2"]
SHAPE += ["--context", "16", "--dropout", "0.1", "--seed", "5", "--data", "text"]
# The number of Python objects stays the same. Only the holes between them grow, a little and ever more slowly.
AGENT_GROWTH_KIB_MAX = 1024
FORK_SERVER_GROWTH_KIB_MAX = 512


def train(folder: Path, out: str, workers: int, steps: int, *options: str) -> Watched:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    (text / "alphabet.txt").write_text("".join(chr(97 + i * i % 26) for i in range(40_000)))
    shape = ["--steps", str(steps), *SHAPE]
    return Watched(folder, *options, "--nproc-per-node", str(workers), "-m", "elaunch.trainer", "--out", out, *shape)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The directory of the run that does not fail, by workers and steps; each is trained once."""
    runs: dict[tuple[int, int], Path] = {}

    def of(workers: int, steps: int) -> Path:
        if (workers, steps) not in runs:
            folder = tmp_path_factory.mktemp("calm")
            with train(folder, "run", workers, steps) as job:
                assert job.wait(300) == 0, job.output
            runs[workers, steps] = folder / "run"
        return runs[workers, steps]

    return of


@pytest.mark.parametrize(
    ("workers", "generations", "steps"),
    [
        pytest.param(3, 8, 200, id="short"),
        *(pytest.param(n, 200, 4000, id=f"{n}-workers") for n in (2, 3, 4)),
    ],
)
def test_a_storm_of_kills_changes_no_bit_and_leaves_nothing(
    tmp_path: Path, calm: Calm, workers: int, generations: int, steps: int
) -> None:
    dice = seeded()
    started_s = time.monotonic()
    with train(tmp_path, "stormy", workers, steps, "--max-restarts", str(2 * generations)) as job:
        storm = Storm(job, tmp_path / "stormy", workers, dice)
        census = Census(job)
        storm.rage(generations, census, census_every=max(4, generations // 20))
        private = [path.name for path in job.run_dirs()]
        marker = job_marker(job)
        assert job.wait(300) == 0, job.output[-20_000:]

        print(f"{workers} workers, {time.monotonic() - started_s:.0f} s; {storm.figures()}")
        print(f"own memory in KiB of (agent, fork server) at each count: {census.memory_kib}")
        assert f"{generations} of {2 * generations} restarts used" in job.stderr
        job.assert_nothing_is_left(pids=storm.seen)

    assert_no_trace(job, storm, private, marker)
    assert_memory_is_flat(census)
    assert_same_run(tmp_path / "stormy", calm(workers, steps))


def job_marker(job: Watched) -> str:
    name = next(iter(job.run_dirs())).name
    assert re.fullmatch(r"elaunch_[0-9a-f]{16}", name), name
    return job.markers().pop()


def assert_no_trace(job: Watched, storm: Storm, private: list[str], marker: str) -> None:
    """Check that no process, shared memory, cgroup or temporary file of the job is left."""
    assert len(private) == 1
    assert not alive(storm.seen)
    assert not list(job.tmp.iterdir())
    others = [Path(folder, private[0]) for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    assert not [path for path in others if path.exists()]
    assert not shared_memory_of([*storm.seen, job.process.pid])
    assert not cgroups_named(marker)


def assert_memory_is_flat(census: Census) -> None:
    """Check that memory does not grow. The first tenth is for warming up: pools and caches fill once."""
    warm = census.memory_kib[len(census.memory_kib) // 10 :]
    agent_kib, server_kib = (last - first for first, last in zip(warm[0], warm[-1], strict=True))
    assert agent_kib <= AGENT_GROWTH_KIB_MAX, f"the agent grew by {agent_kib} KiB: {warm}"
    assert server_kib <= FORK_SERVER_GROWTH_KIB_MAX, f"the fork server grew by {server_kib} KiB: {warm}"


def assert_same_run(out: Path, calm: Path) -> None:
    """The same steps, losses and state, bit for bit."""
    assert losses(out) == losses(calm)
    assert result(out)["params_sha256"] == result(calm)["params_sha256"]
    ours, theirs = (without_times(tensors(newest_checkpoint(folder))) for folder in (out, calm))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    import torch

    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


def newest_checkpoint(out: Path) -> dict[str, Any]:
    from elaunch.trainer import Checkpoints

    state: dict[str, Any] = {}
    assert Checkpoints(out / "checkpoints", generation=0).load_newest(state)
    return state


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by their path in it."""
    import torch

    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {place: tensor for key, item in items for place, tensor in tensors(item, f"{name}/{key}").items()}


def without_times(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the columns of the newest steps' figures that say when and where a step was done."""
    from elaunch.trainer.gpt.recorder import FIGURES

    # NaN stands for what is not known, and equals nothing.
    last = FIGURES.index("seconds")
    return {name: each[:, :last].nan_to_num() if name.endswith("/figures") else each for name, each in found.items()}


def result(out: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((out / "result.json").read_text())
    return answer


def losses(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]
