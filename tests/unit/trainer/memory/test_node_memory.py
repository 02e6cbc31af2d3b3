"""Copies of the training state in files that outlive the workers."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.trainer.memory import node_memory
from elaunch.trainer.memory.node_memory import NodeMemory, NoRoom
from elaunch.trainer.memory.slots import copy_on_host
from elaunch.trainer.state import Version
from tests.forked import Child
from tests.harness import DEADLINE_S, wait_for

LAYOUT = b"sixteen bytes ok"
SHM = Path("/dev/shm")


def state_of(step: int, size: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step)), "step": step}


def saved(memory: NodeMemory, generation: int, step: int) -> Version:
    return memory.save(Version(generation, step), lambda: state_of(step))


def contents(memory: NodeMemory) -> list[float]:
    return [slot.read(header)["w"][7].item() for header, slot in memory.pair.versions()]


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = SHM / f"elaunch-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_corrupt_copy_is_named_and_the_one_before_it_counts(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "m", LAYOUT)
    saved(memory, 0, 1)
    saved(memory, 0, 2)
    header, slot = memory.pair.versions()[0]
    with slot.path.open("r+b") as file:
        file.seek(header.length - 9000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    logged: list[str] = []

    found = NodeMemory(tmp_path, "m", LAYOUT, log=logged.append).verified(all_of_them=False)

    assert [holding.version for holding in found] == [Version(0, 1)]
    assert logged == [f"skipping the copy of step 2 in {slot.path}: its checksum is wrong"]
    # The damaged copy is not found again, and is overwritten next.
    assert memory.versions() == [Version(0, 1)]
    saved(memory, 0, 3)
    assert memory.versions() == [Version(0, 3), Version(0, 1)]


def test_too_little_room_is_one_sentence_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 5, 1_000_000

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    memory = NodeMemory(tmp_path, "m", LAYOUT)

    with pytest.raises(NoRoom, match=r"has 5.0 MB free and this node's copies of the training state take 8.0 MB"):
        memory.save(Version(0, 1), lambda: {"w": torch.zeros(1_000_000)})

    assert not list(tmp_path.glob("*state*"))


class Writer:
    """A worker that copies steps 1 and 2 and half of step 3. Then it reports that, and waits until it is killed or may
    continue. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        reports, reporting = os.pipe()
        waiting, self._go = os.pipe()
        self._child = Child(lambda: self._write(folder, reporting, waiting))
        self.pid = self._child.pid
        os.close(reporting)
        os.close(waiting)
        try:
            assert select.select([reports], [], [], DEADLINE_S)[0], "the worker copies nothing"
            assert os.read(reports, 4) == b"half"
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(reports)

    def _write(self, folder: Path, reporting: int, waiting: int) -> None:
        os.close(self._go)
        # The forked child does not have its parent's threads.
        torch.set_num_threads(1)

        def half(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            copy_on_host([targets[0][:50_000]], [sources[0][:50_000]])
            os.write(reporting, b"half")
            os.read(waiting, 1)
            copy_on_host(targets, sources)

        memory = NodeMemory(folder, "m", LAYOUT)
        for step in (1, 2, 3):
            state = {"w": torch.full((100_000,), float(step))}
            memory.save(Version(0, step), lambda state=state: state, half if step == 3 else copy_on_host)  # type: ignore[misc]

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.go_on()

    def kill(self) -> None:
        self._child.kill()

    def go_on(self) -> None:
        """Close the worker's input, on which it waits. Other processes may have that pipe open too."""
        if self._go >= 0:
            os.close(self._go)
        self._go = -1


def test_a_writer_killed_in_the_middle_leaves_the_other_copy_and_no_lock(shm: Path) -> None:
    memory = NodeMemory(shm, "m", LAYOUT)
    with Writer(shm) as writer:
        # The fault has struck: half of the slot of step 1 already has the data of step 3.
        torn = next(slot for slot in memory.pair.slots if slot.header() is None)
        region = torn.region()
        raw = region[len(region) - 400_000 :].view(torch.float32)
        assert {1.0, 3.0} <= set(raw[100:-100].tolist())

        writer.kill()

    # If the dead writer still had the lock, this would wait for ever.
    assert memory.save(Version(0, 2), lambda: pytest.fail("not to be copied")) == Version(0, 2)
    assert memory.versions() == [Version(0, 2)]
    assert contents(memory) == [2.0]
    assert memory.save(Version(0, 4), lambda: state_of(4, 100_000)) == Version(0, 4)
    assert memory.versions() == [Version(0, 4), Version(0, 2)]


def test_a_writer_waits_for_another_one_and_then_has_nothing_to_do(shm: Path) -> None:
    memory = NodeMemory(shm, "m", LAYOUT)
    with Writer(shm) as writer:

        def waits() -> None:
            # Close this process's end too, or the writer's input never ends.
            writer.go_on()
            # The forked child does not have its parent's threads.
            torch.set_num_threads(1)
            found = memory.save(Version(0, 3), lambda: state_of(3, 100_000), lambda *_: pytest.fail("not to be copied"))
            assert found == Version(0, 3)

        with Child(waits) as child:
            wait_for(lambda: f"{shm}/m.lock" in opened_by(child.pid), "that it waits")

            writer.go_on()

            assert child.end() == 0
    assert memory.versions() == [Version(0, 3), Version(0, 2)]


def opened_by(pid: int) -> list[str]:
    """The files that a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


def test_a_stopped_writer_blocks_no_worker_forever(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "_LOCK_S", 0.3)
    found = NodeMemory(shm, "m", LAYOUT)
    with Writer(shm) as writer:
        os.kill(writer.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"of this node has held the lock for 0\.3 s; is it stopped"):
            saved(found, 0, 9)
    assert saved(found, 0, 9) == Version(0, 9)


def test_survivors_that_differ_by_a_step_leave_the_snapshot_that_is_to_stay(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "m", LAYOUT)
    saved(memory, 0, 45)
    saved(memory, 0, 50)

    for step in (57, 58, 59):
        memory.save(Version(0, step), lambda step=step: state_of(step), spare=[Version(0, 50)])  # type: ignore[misc]

    assert memory.versions() == [Version(0, 59), Version(0, 50)]
    assert contents(memory) == [59.0, 50.0]


def test_given_up_steps_are_not_found_again(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path, "m", LAYOUT)
    records = memory.records(0)
    saved(memory, 0, 50)
    saved(memory, 0, 57)
    records.keep(Version(0, 50), {"large": 1})
    records.stage(Version(0, 57), {})
    records.stage(Version(0, 58), {})

    memory.drop_newer(Version(0, 50))

    assert memory.versions() == [Version(0, 50)]
    assert [header.version for header, _, _ in records.versions()] == [Version(0, 50)]
    # The next failure overwrites the copy that was given up, not the one that all ranks have.
    saved(memory, 1, 53)
    assert memory.versions() == [Version(1, 53), Version(0, 50)]


def test_the_records_of_the_last_three_steps_stay(tmp_path: Path) -> None:
    records = NodeMemory(tmp_path, "m", LAYOUT).records(0)
    for step in range(1, 8):
        records.stage(Version(0, step), {"random": torch.full((2,), step)})

    found = {step: records.find(Version(0, step)) for step in range(3, 8)}
    assert {step: its and its["random"].tolist() for step, its in found.items()} == {
        3: None,
        4: None,
        **{step: [step, step] for step in (5, 6, 7)},
    }


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    saved(NodeMemory(tmp_path, "m", LAYOUT), 0, 1)

    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
