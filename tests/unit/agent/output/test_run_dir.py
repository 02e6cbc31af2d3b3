"""agent.output.run_dir: where a run keeps its files, and when each stage happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaunch.agent.guardian import guardian
from elaunch.agent.guardian.guardian import CLAIM, remove_abandoned
from elaunch.agent.output.run_dir import LATEST, TIMELINE, Places, RunDir, Timeline, new_places
from elaunch.agent.output.streams import LogFile
from tests.harness import RUN_LIMIT_S


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def of_dead_agent() -> Path:
    """The private folder of a process that has exited."""
    code = "from elaunch.agent.output.run_dir import RunDir; print(RunDir(None, 'job', print).private)"
    return Path(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=RUN_LIMIT_S).strip())


def test_latest_is_a_link_to_the_newest_run_that_moves_with_its_folder(tmp_path: Path, warnings: list[str]) -> None:
    first, second = (RunDir(tmp_path / "logs", "job", warnings.append).logs for _ in range(2))
    assert first
    assert second

    assert (tmp_path / "logs" / LATEST).readlink() == Path(second.name)
    (tmp_path / "logs").rename(tmp_path / "kept")
    assert (tmp_path / "kept" / LATEST / ".").samefile(tmp_path / "kept" / second.name)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted([first.name, second.name, LATEST])


def test_what_workers_keep_lies_in_shared_memory_in_a_folder_that_is_private(warnings: list[str]) -> None:
    places = new_places()
    run_dir = RunDir(None, "job", warnings.append, places)

    run_dir.make_memory()

    folder = run_dir.memory
    assert folder
    assert folder.parent == Path("/dev/shm")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert str(folder) in places.memory, "the guardian would not remove it"
    assert run_dir.memory_trouble == ""
    assert run_dir.private
    shutil.rmtree(run_dir.private)
    shutil.rmtree(folder)


def test_private_folders_that_were_removed_are_made_again_and_no_other_users_is_taken(
    temporary: Path, warnings: list[str]
) -> None:
    places = Places(*((str(temporary / f"{name}-1"), str(temporary / f"{name}-2")) for name in "abc"))
    run_dir = RunDir(None, "job", warnings.append, places)
    run_dir.make_memory()
    first, no_trouble = run_dir.memory, run_dir.memory_trouble
    for place in (places.private[0], places.memory[0]):
        shutil.rmtree(place)

    run_dir.make_memory()
    again, removed, folder = run_dir.memory, run_dir.memory_trouble, run_dir.rank(1, 0)
    shutil.rmtree(places.memory[0])
    Path(places.memory[0]).symlink_to(temporary)
    run_dir.make_memory()

    assert (no_trouble, again) == ("", first)
    assert removed.startswith(f"{first} was removed while workers ran; it was recreated empty")
    assert folder == Path(places.private[0], "attempt_1", "0")
    assert stat.S_IMODE(Path(places.private[0]).stat().st_mode) == 0o700
    assert run_dir.memory == Path(places.memory[1])
    assert run_dir.memory_trouble.startswith(f"{first} was removed while workers ran")
    assert warnings == []


def test_who_sees_one_folder_of_a_run_cannot_infer_the_names_of_the_others() -> None:
    kinds = new_places()

    names = [{re.search(r"elaunch_([0-9a-f]{16})", place)[1] for place in places} for places in kinds]  # type: ignore[index]

    assert [len(each) for each in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3
    assert set.union(*names).isdisjoint(re.findall(r"[0-9a-f]{16}", " ".join(sum(new_places(), ()))))


def test_a_folder_that_somebody_has_made_before_is_not_taken(temporary: Path, warnings: list[str]) -> None:
    taken, free = str(temporary / "elaunch_taken"), str(temporary / "elaunch_free")
    Path(taken).mkdir()
    run_dir = RunDir(
        None, "job", warnings.append, Places((taken, free), (taken, f"{free}_memory"), (taken, f"{free}_socket"))
    )

    run_dir.make_memory()

    assert run_dir.private == Path(free)
    assert run_dir.memory == Path(f"{free}_memory")
    assert "File exists" in run_dir.memory_trouble
    assert list(run_dir.socket_folders()) == [Path(f"{free}_socket")]


def test_without_shared_memory_it_lies_with_the_temporary_files(
    temporary: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.agent.output.run_dir.SHARED_MEMORY", "/proc/nowhere")
    places = new_places()
    run_dir = RunDir(None, "job", warnings.append, places)

    run_dir.make_memory()

    folder, trouble = run_dir.memory, run_dir.memory_trouble
    assert folder
    assert folder.parent == temporary
    assert str(folder) in places.memory
    assert trouble.startswith("shared memory is not available (/proc/nowhere/elaunch_")
    assert trouble.endswith(f"No such file or directory); what workers keep for the next generation goes to {folder}")


@pytest.mark.parametrize("whose", ["living", "dead", "another boot's", "another user's", "unclaimed"])
def test_only_what_a_dead_agent_of_this_user_and_boot_has_left_is_removed(
    temporary: Path, warnings: list[str], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whose == "living":
        folder = RunDir(None, "job", warnings.append).private
        assert folder
    else:
        folder = of_dead_agent()
        (folder / "attempt_0").mkdir()
    match whose:
        case "another boot's":
            (folder / CLAIM).write_text("another")
        case "another user's":
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        case "unclaimed":
            (folder / CLAIM).unlink()
    (temporary / "elaunch_of_somebody").mkdir()

    remove_abandoned([str(temporary / "elaunch_0000000000000000")])

    assert folder.parent == temporary
    assert folder.exists() == (whose != "dead")
    assert (temporary / "elaunch_of_somebody").exists()


def test_a_folder_that_is_swapped_while_it_is_removed_costs_no_other_file(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = of_dead_agent()
    (folder / "Documents").mkdir()
    precious = tmp_path / "home" / "Documents" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()

    boot_id = guardian.boot_id()

    def swap() -> bytes:
        # The last check before the removal. The owner of a folder that is not sticky may rename what is in it.
        folder.rename(temporary / "away")
        folder.symlink_to(tmp_path / "home")
        return boot_id

    monkeypatch.setattr(guardian, "boot_id", swap)

    remove_abandoned([str(temporary / "elaunch_0000000000000000")])

    assert folder.is_symlink(), "the swap never happened"
    assert precious.exists()
    assert not (temporary / "away" / "Documents").exists()


def test_the_path_of_the_logs_has_no_dots_unless_they_lead_elsewhere(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")

    plain, behind_link = (
        RunDir(tmp_path / each / ".." / "logs", "job", warnings.append).logs for each in ("runs", "link")
    )

    assert plain
    assert plain.parent == tmp_path / "logs"
    assert behind_link
    assert behind_link.parent.resolve() == tmp_path / "far" / "logs"


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o640, 0o750), (0o077, 0o600, 0o700)])
def test_logs_are_for_the_user_and_the_group_at_most(
    tmp_path: Path, warnings: list[str], umask: int, file_mode: int, folder_mode: int
) -> None:
    before = os.umask(umask)
    try:
        run_dir = RunDir(tmp_path / "new" / "logs", "job", warnings.append)
        folder = run_dir.rank(0, 0)
        assert folder
        assert run_dir.logs
        LogFile(str(folder / "stdout.log"), warnings.append).close()
        (folder / "error.json").touch()
    finally:
        os.umask(before)

    assert stat.S_IMODE((folder / "stdout.log").stat().st_mode) == file_mode
    assert stat.S_IMODE(run_dir.logs.stat().st_mode) == folder_mode
    # The user's own: the log folder, and what workers write.
    assert stat.S_IMODE((tmp_path / "new" / "logs").stat().st_mode) == 0o777 & ~umask
    assert stat.S_IMODE((folder / "error.json").stat().st_mode) == 0o666 & ~umask


def test_a_stage_is_a_line_with_both_clocks_and_its_fields(tmp_path: Path, warnings: list[str]) -> None:
    timeline = Timeline(tmp_path, warnings.append, lambda work: work())
    before = time.monotonic()

    timeline.stamp(2, "forked", rank=3, pid=4711)
    timeline.stamp(2, "cleared")

    first, second = [json.loads(line) for line in (tmp_path / TIMELINE).read_text().splitlines()]
    assert (first["generation"], first["event"], first["rank"], first["pid"]) == (2, "forked", 3, 4711)
    assert before <= first["monotonic_s"] <= second["monotonic_s"] <= time.monotonic()
    assert abs(first["at"] - time.time()) < 60
    assert warnings == []


def test_a_disk_error_costs_one_warning(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / TIMELINE).symlink_to("/dev/full")
    timeline = Timeline(tmp_path, warnings.append, lambda work: work())

    timeline.stamp(0, "sealed")
    timeline.stamp(0, "forked")

    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
