"""The keeper in one process: what it restores, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import link
from elaunch.trainer.checkpoint import storage
from elaunch.trainer.checkpoint.checkpoints import Checkpoints
from elaunch.trainer.checkpoint.claim import NOTE
from elaunch.trainer.checkpoint.filesystem import LocalFiles
from elaunch.trainer.keeper import disk_copies
from elaunch.trainer.keeper.disk_copies import NotDurable
from elaunch.trainer.keeper.guarded_state import GuardedState
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory.node_memory import Records
from elaunch.trainer.state import Version
from tests.harness import RUN_LIMIT_S
from tests.unit.trainer.conftest import Fails, fail

pytestmark = pytest.mark.usefixtures("memory")


class Job:
    """A small training that is built again for each generation."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])
        self.extra: dict[str, Any] = {"losses": []}
        self.logged: list[str] = []
        self.keeper = Keeper(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            extra=self.extra,
            warm_up=lambda: self.model(torch.zeros(2, 4)).sum().backward(),
            **{"lose_at_most": 1, "log": self.logged.append, **options},
        )

    def train(self, steps: int, at: dict[int, Callable[[], object]] | None = None) -> list[float]:
        with self.keeper:
            # A DataLoader's iterator also draws from the global generator at every start.
            torch.empty((), dtype=torch.int64).random_()
            for step in self.keeper.steps(steps):
                inputs = torch.randn(8, 4) + random.random() + float(np.random.rand())
                loss = self.model(inputs).pow(2).mean()
                loss.backward()
                if at and step in at:
                    at[step]()
                with self.keeper.commit():
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                    self.extra["losses"].append(loss.item())
        return list(self.extra["losses"])

    def state(self) -> bytes:
        content = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()], content)
        return content.getvalue()


def seeded(seed: int = 5) -> None:
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("lose_at_most", [1, 1000])
def test_a_failure_in_the_middle_of_a_step_repeats_only_that(
    monkeypatch: pytest.MonkeyPatch, memory: Path, fails: Fails, lose_at_most: int
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")
    seeded()
    calm = Job()
    losses = calm.train(10)
    monkeypatch.setenv("ELAUNCH_MEMORY", str(memory))

    seeded()
    fails(lambda: Job(lose_at_most=lose_at_most).train(10, {5: fail}))
    seeded(77)
    resumed = Job(lose_at_most=lose_at_most)

    assert resumed.train(10) == losses
    assert resumed.state() == calm.state()
    assert resumed.logged == ["restored step 4 from memory (of generation 0); 0 steps are repeated"]


@pytest.mark.parametrize(("lose_at_most", "step"), [(0, 6), (1, 5), (4, 5), (6, 1)])
def test_a_job_whose_workers_all_die_before_the_next_step_loses_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch, fails: Fails, lose_at_most: int, step: int
) -> None:
    job = Job(lose_at_most=lose_at_most)
    # The worker dies immediately, after its commit: nothing is rescued.
    monkeypatch.setattr(GuardedState, "rescue", lambda _: None)
    end = job.keeper.step_begin

    def begin() -> None:
        """The evaluation after step 6 fails."""
        end() if job.keeper.step != 6 else fail()

    job.keeper.step_begin = begin  # type: ignore[method-assign]
    fails(lambda: job.train(10))

    with Job().keeper as resumed:
        assert (resumed.step, resumed.repeated) == (step, 6 - step)


def test_an_optimizer_step_that_fails_is_not_kept(fails: Fails) -> None:
    job = Job(lose_at_most=1000)
    real = job.optimizer.step
    calls: list[int] = []

    def step(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            with torch.no_grad():
                job.model[0].weight.add_(1)
            fail()
        real()

    job.optimizer.step = step  # type: ignore[method-assign, assignment]
    fails(lambda: job.train(10))

    resumed = Job()
    with resumed.keeper:
        # The copy before is restored: the worker's own state was neither that of step 3 nor that of step 4.
        assert resumed.keeper.step == 1
        assert not torch.equal(resumed.model[0].weight, job.model[0].weight)


def test_what_other_nodes_ranks_had_of_given_up_steps_is_not_found_again(memory: Path, fails: Fails) -> None:
    job = Job()
    fails(lambda: job.train(10, {5: fail}))
    mirrored = Records(memory, "training", job.keeper._training.layout(), 3)
    for step in (3, 6):
        mirrored.keep(Version(0, step), {})

    Job().train(5)

    assert [header.version for header, *_ in mirrored.versions()] == [Version(0, 3)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_on", [True, False])
def test_a_step_in_join_is_refused(*, is_on: bool) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    keeper = Keeper(model, torch.optim.AdamW(model.parameters()))
    refused = pytest.raises(ValueError, match=r"^join\(\) is on for DistributedDataParallel: .*next\(batches\)")

    with keeper, refused if is_on else contextlib.nullcontext(), model.join(enable=is_on):
        for _ in keeper.steps(2):
            with keeper.commit():
                pass
    assert keeper.step == (0 if is_on else 2)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda job: job.extra.update(path=[1, {"a": Path("of a file")}]), "extra.0.path.1.a"),
        (lambda job: job.extra.update(array=np.zeros(2)), "extra.0.array"),
        (lambda job: job.extra.update(kind=Path), "extra.0.kind"),
        (lambda job: setattr(job.scheduler, "odd", Path("of a file")), "scheduler.0.odd"),
        (lambda job: job.optimizer.param_groups[0].update(odd=Path("of a file")), "param_groups.0.0.odd"),
    ],
)
def test_a_state_that_becomes_one_that_cannot_be_kept_is_refused_by_that_commit_and_the_copy_before_it_stays(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Job], object], name: str
) -> None:
    job = Job()

    with pytest.raises(TypeError, match=rf"^step 3 is not committed: `{name}` cannot be kept: "):
        job.train(5, {3: lambda: spoil(job)})

    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    again = Job()
    assert len(again.train(5)) == 5
    assert again.logged == ["restored step 2 from memory (of generation 0); 0 steps are repeated"]


@pytest.mark.parametrize("value", [frozenset({1}), bytearray(b"1")], ids=["frozenset", "bytearray"])
def test_what_no_checkpoint_can_hold_is_refused_in_the_commit_and_kept_without_checkpoints(
    value: object, tmp_path: Path
) -> None:
    job = Job(checkpoints=tmp_path / "c")
    with pytest.raises(
        TypeError, match=r"^step 3 is not committed: `extra\.0\.seen\.0` is a .*, which no checkpoint can hold"
    ):
        job.train(5, {3: lambda: job.extra.update(seen=[value])})
    assert job.keeper.step == 2

    job = Job(name="other")
    assert len(job.train(5, {3: lambda: job.extra.update(seen=[value])})) == 5


@pytest.mark.parametrize("where", ["memory", "checkpoint"])
def test_numbers_of_numpy_are_kept_with_their_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    numbers = [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.longdouble(0.1), np.str_("best")]

    def spoil(job: Job) -> None:
        job.extra.update(numbers=list(numbers), by_number={np.int64(7): 1}, seen={np.int64(7)})
        job.optimizer.param_groups[0]["lr"] = np.float64(0.05)
        job.scheduler.best = np.float32(0.3)

    job = Job(checkpoints=tmp_path / "c")
    job.train(4, {2: lambda: spoil(job)})
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    if where == "checkpoint":
        monkeypatch.delenv("ELAUNCH_MEMORY")
    again = Job(checkpoints=tmp_path / "c")
    with again.keeper:
        pass

    found = again.extra["numbers"]
    assert (found, [*map(type, found)]) == (numbers, [*map(type, numbers)])
    assert again.extra["by_number"][7] == 1
    assert again.extra["seen"] == {7}
    assert type(again.scheduler.best) is np.float32
    assert where in again.logged[0]


def test_an_unreadable_checkpoint_does_not_cost_what_is_in_memory(
    tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(lambda: Job(checkpoints=tmp_path / "c").train(5, {4: fail}))
    newer = Checkpoints(tmp_path / "c", generation=0, log=pytest.fail)
    newer.save(9, {"model": {}})

    def unreadable(self: LocalFiles, name: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalFiles, "open", unreadable)
    again = Job(checkpoints=tmp_path / "c")

    assert len(again.train(5)) == 5
    assert any("the older state in memory is restored" in text for text in again.logged)
    assert "restored step 3 from memory (of generation 0); 0 steps are repeated" in again.logged


def test_another_training_is_refused_where_there_are_checkpoints_and_other_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier job, on another host, left checkpoints up to step 3."""
    Job(checkpoints=tmp_path / "c").train(3)
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    monkeypatch.delenv("ELAUNCH_MEMORY")
    note = tmp_path / "c" / NOTE
    left = json.loads(note.read_text())
    assert left["ended"]
    left |= {"process": "boot:namespace:1:1", "run": "other", "arguments": "--lr 0.1"}
    note.write_text(json.dumps(left))

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["other.py"])
        with pytest.raises(ValueError, match=r"another training, by job other .*, this one `other.py`\. .* step 3 "):
            Job(checkpoints=tmp_path / "c").keeper.__enter__()
    again = Job(checkpoints=tmp_path / "c")
    again.train(4)
    assert "which had other arguments (`--lr 0.1`)" in again.logged[0]

    note.unlink()
    monkeypatch.setattr(sys, "argv", ["other.py"])
    monkeypatch.setenv("ELAUNCH_GENERATION", "2")
    assert len(Job(checkpoints=tmp_path / "c").train(5)) == 5


def test_a_job_ends_at_the_checkpoint_after_another_one_has_taken_its_place(tmp_path: Path) -> None:
    note = tmp_path / "c" / NOTE
    job = Job(checkpoints=tmp_path / "c", checkpoint_every=2)

    def taken() -> None:
        job.keeper._copies.wait()
        note.write_text(json.dumps({**json.loads(note.read_text()), "token": "its", "host": "elsewhere"}))

    with pytest.raises(ValueError, match=r"on elsewhere.* has taken .*"):
        job.train(9, {3: taken})

    assert [mark.step for mark in storage.marks(tmp_path / "c")] == [2]
    assert json.loads(note.read_text())["token"] == "its"


@pytest.mark.parametrize(("keep", "steps"), [({}, [4, 6, 7]), ({"keep": 1}, [7])])
def test_the_newest_checkpoints_stay(tmp_path: Path, keep: dict[str, int], steps: list[int]) -> None:
    Job(checkpoints=tmp_path / "c", checkpoint_every=2, **keep).train(7)

    assert [mark.step for mark in storage.marks(tmp_path / "c")] == steps


def test_an_end_that_is_not_on_the_disk_is_no_success_and_the_next_start_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_copies, "_AGAIN_S", (1,))
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "c"
    with pytest.raises(ValueError, match=f"checkpoints cannot be written to {directory}: Not a directory; give anoth"):
        Job(checkpoints=directory).train(5)
    # A restart may have a state in memory.
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    job = Job(checkpoints=directory)
    with pytest.raises(NotDurable, match="the final state is not durable: the checkpoint of step 5 could "):
        job.train(5)
    failed = f"the checkpoint of step 5 could not be written: Not a directory; there is none in {directory}"
    assert job.logged == [
        f"checkpoints cannot be written to {directory}: Not a directory; until they can, there are none",
        "there is no state to restore: training begins at step 1",
        failed,
        f"{failed}; it is the last one, and is retried for 1 s: fix the cause, or the program fails",
    ]
    (tmp_path / "file").unlink()
    monkeypatch.setenv("ELAUNCH_GENERATION", "2")
    again = Job(checkpoints=tmp_path / "file" / "c")

    assert again.train(5) == job.extra["losses"]

    assert again.logged == ["restored step 5 from memory (of generation 1); 0 steps are repeated"]
    assert [mark.step for mark in storage.marks(tmp_path / "file" / "c")] == [5]


def test_a_last_checkpoint_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A job's first start refuses checkpoints that cannot be written.
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    blocking = tmp_path / "file"
    blocking.write_text("")
    # A checkpoint that is not the last fails as well, but is not tried again.
    job = Job(checkpoints=blocking / "c", checkpoint_every=5)
    monkeypatch.setattr(link, "phase", lambda _: blocking.unlink(missing_ok=True))

    job.train(6)

    assert sum("it is the last one, and is retried for 60 s: " in text for text in job.logged) == 1
    assert [mark.step for mark in storage.marks(blocking / "c")] == [6]


def test_a_stop_while_the_last_checkpoint_is_tried_again_is_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    (tmp_path / "file").write_text("")
    job = Job(checkpoints=tmp_path / "file" / "c")
    monkeypatch.setattr(link, "phase", lambda _: signal.raise_signal(signal.SIGTERM))

    with pytest.raises(SystemExit) as ended:
        job.train(3)

    assert ended.value.code == 143
    assert job.logged[-1] == (
        "stopped after step 3, on a request to leave; there is no checkpoint, so the same command starts over"
    )


def test_a_step_without_commit_is_refused() -> None:
    job = Job()

    with pytest.raises(RuntimeError, match=r"step 1 ended without keeper\.commit\(\)"), job.keeper:
        for _ in job.keeper.steps(2):
            pass


@pytest.mark.parametrize(
    "options", [{"verify_every": 0}, {"keep": 0}, {"lose_at_most": -1}, {"name": "a/b"}, {"hook_state": 3}]
)
def test_what_cannot_be_meant_is_refused_with_the_value(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"is (0|-1|'a/b'|a int)"):
        Job(**options)


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)],
)
def test_a_signal_ends_the_step_first(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    job = Job(checkpoints=tmp_path / "checkpoints")

    with pytest.raises(SystemExit) as ended:
        job.train(10, {3: lambda: signal.raise_signal(signum)})

    assert ended.value.code == code
    assert job.keeper.step == 3
    assert job.logged[-1].startswith("stopped after step 3, ")
    assert list((tmp_path / "checkpoints").glob("generation-*-step-00000003*"))
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_stop_for_one_of_two_keepers_makes_the_state_of_the_other_durable_too(tmp_path: Path) -> None:
    one, other = (Job(name=name, checkpoints=tmp_path / name) for name in ("one", "other"))

    with contextlib.suppress(SystemExit), one.keeper, other.keeper:
        for _ in zip(other.keeper.steps(9), one.keeper.steps(9), strict=True):
            for job in (one, other):
                with job.keeper.commit():
                    job.optimizer.step()
            if one.keeper.step == 4:
                signal.raise_signal(signal.SIGTERM)

    for name in ("one", "other"):
        assert list((tmp_path / name).glob("generation-*-step-00000004*")), name


def test_where_there_is_no_room_for_what_is_a_ranks_own_its_steps_are_counted_still(
    fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = Job(lose_at_most=4)
    with monkeypatch.context() as patch:
        patch.setattr(Records, "stage", no_room)
        # The worker dies immediately, so nothing is rescued.
        patch.setattr(GuardedState, "rescue", lambda _: None)
        fails(lambda: job.train(10, {8: fail}))

    resumed = Job()
    with resumed.keeper:
        assert (resumed.keeper.step, resumed.keeper.repeated) == (5, 2)
    assert job.logged == ["rank 0's buffers and random states are not kept in memory: No space left on device"]


@pytest.fixture
def small_memory(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The job's memory is a small file system, in place of `memory`."""
    folder = memory.with_name("shm")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, timeout=RUN_LIMIT_S
    )
    if mounted.returncode:
        pytest.skip("mounting takes root")
    (folder / "memory").mkdir()
    monkeypatch.setenv("ELAUNCH_MEMORY", str(folder / "memory"))
    yield
    # Files may still be mapped. The lazy unmount completes when no process uses them any more.
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=RUN_LIMIT_S)


@pytest.mark.usefixtures("small_memory")
def test_too_little_memory_is_one_warning_and_no_failure() -> None:
    job = Job()
    job.extra["ballast"] = torch.zeros(50_000)

    assert len(job.train(10)) == 10

    (logged,) = job.logged
    assert re.search(r"shm has 0\.\d+ MB free and this node's copies of the training state take 0\.4\d* MB", logged)
    assert "goes back to the last checkpoint" in logged


@pytest.mark.parametrize(
    ("option", "value", "lose_at_most"), [("copy_every", 1, 0), ("snapshot_every", 5, 5), ("stop_every", 5, None)]
)
def test_a_former_option_is_read_as_the_one_that_replaced_it(option: str, value: int, lose_at_most: int | None) -> None:
    model = nn.Linear(1, 1)

    with pytest.warns(FutureWarning, match=f"lose_at_most={lose_at_most} replaces {option}={value}"):
        keeper = Keeper(model, torch.optim.SGD(model.parameters()), **{option: value})

    assert keeper._lose_at_most == lose_at_most
