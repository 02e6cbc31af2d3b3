"""profiling.places: where files go, and what a generation leaves for the next."""

from __future__ import annotations

from pathlib import Path

from elaunch.trainer.profiling.places import profile_folder, read_mark, write_mark
from elaunch.trainer.profiling.steps import Before


def test_files_go_to_the_generations_log_folder_and_without_one_to_the_folder_that_is_given(tmp_path: Path) -> None:
    run = tmp_path / "2026-11-24_night_4f1c09ab"
    run.mkdir()
    environ = {"TORCHELASTIC_ERROR_FILE": str(run / "attempt_2" / "0" / "error.json")}

    # Without --log-dir the folder is private, and removed at the job's end.
    assert profile_folder(environ, 2, Path("profile")) == Path("profile/generation_2")
    (run / "timeline.jsonl").touch()
    assert profile_folder(environ, 2, Path("profile")) == run / "attempt_2" / "profile"
    assert profile_folder({}, 0, Path("out/profile")) == Path("out/profile/generation_0")
    assert profile_folder({"TORCHELASTIC_ERROR_FILE": "error.json"}, 0, Path("x")) == Path("x/generation_0")


def test_the_next_generation_reads_what_this_one_left(tmp_path: Path) -> None:
    environ = {"ELAUNCH_MEMORY": str(tmp_path)}

    assert read_mark(environ) == (Before.NOTHING, [])
    write_mark(environ, Before.BEGUN, [])
    assert read_mark(environ) == (Before.BEGUN, [])
    write_mark(environ, Before.DONE, ["steps 10 to 12 took 20.0 ms each"])
    assert read_mark(environ) == (Before.DONE, ["steps 10 to 12 took 20.0 ms each"])
    assert len([*tmp_path.iterdir()]) == 1


def test_a_mark_that_cannot_be_read_or_written_is_none(tmp_path: Path) -> None:
    for content in (b"", b"[]", b'{"state": "begun"}', b'{"state": "else", "sentences": []}', b"\xff"):
        (tmp_path / "profiled.json").write_bytes(content)
        assert read_mark({"ELAUNCH_MEMORY": str(tmp_path)})[0] is Before.NOTHING
    write_mark({"ELAUNCH_MEMORY": str(tmp_path / "gone")}, Before.DONE, [])
    assert read_mark({}) == (Before.NOTHING, [])
