"""What is remembered of a tuning: found again by an equal key alone, and never believed if it is damaged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.trainer.tuning.memory import ChoiceFiles, TunedChoice, TuningKey
from elaunch.trainer.tuning.settings import CommSettings

KEY = TuningKey("abc", world_size=4, nodes=2, link="gloo cpu", torch="2.13", hooks="fp16", start="()", about="")
CHOICE = TunedChoice(CommSettings(5, 1, bucket_view=True), start_s=0.5, chosen_s=0.4, passes=40, at=1e9, key=KEY)


def cache(tmp_path: Path) -> ChoiceFiles:
    return ChoiceFiles.of({"XDG_CACHE_HOME": str(tmp_path / "cache")}, None)


def file_of(tmp_path: Path, key: TuningKey = KEY) -> Path:
    return tmp_path / "cache" / "elaunch" / "tuning" / key.file_name


def test_a_choice_is_found_again(tmp_path: Path) -> None:
    assert cache(tmp_path).find(KEY) == (None, None, [])

    assert cache(tmp_path).keep(CHOICE)[0] == file_of(tmp_path)
    assert cache(tmp_path).find(KEY) == (CHOICE, file_of(tmp_path), [])
    assert file_of(tmp_path).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "other",
    [
        {"model": "abd"},
        {"world_size": 2},
        {"nodes": 1},
        {"link": "nccl"},
        {"torch": "2.14"},
        {"hooks": "fp16 bf16"},
        {"start": "(25)"},
        {"about": "batch 3"},
    ],
)
def test_another_training_does_not_find_it(tmp_path: Path, other: dict[str, object]) -> None:
    cache(tmp_path).keep(CHOICE)

    assert cache(tmp_path).find(replace(KEY, **other))[0] is None  # type: ignore[arg-type]


def damaged(**changes: object) -> str:
    """The file of CHOICE with other values."""
    content = {"format": 1, "start_s": 0.5, "chosen_s": 0.4, "passes": 40, "at": 1e9}
    content["settings"] = {"bucket_mb": 5, "first_bucket_mb": 1, "bucket_view": True, "hook": "none"}  # type: ignore[assignment]
    content["key"] = {name: getattr(KEY, name) for name in TuningKey.__dataclass_fields__}  # type: ignore[assignment]
    for name, value in changes.items():
        place, _, rest = name.partition("__")
        if rest:
            content[place][rest] = value  # type: ignore[index]
        else:
            content[place] = value  # type: ignore[assignment]
    return json.dumps(content)


def test_the_damaged_files_below_are_sound_but_for_their_damage(tmp_path: Path) -> None:
    cache(tmp_path).keep(CHOICE)
    file_of(tmp_path).write_text(damaged())

    assert cache(tmp_path).find(KEY)[0] == CHOICE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\0" * 10,
        "[" * 100_000,
        "9" * 70_000,
        damaged(format=2),
        damaged(settings=None),
        damaged(settings__more=1),
        damaged(settings__bucket_mb=0),
        damaged(settings__bucket_mb=-5),
        damaged(settings__bucket_mb="5"),
        damaged(settings__bucket_mb=True),
        damaged(settings__bucket_mb=1e300),
        damaged(settings__first_bucket_mb=None),
        damaged(settings__bucket_view=1),
        damaged(settings__hook="rm -rf"),
        damaged(settings__hook=["none"]),
        damaged(settings__hook="bf16"),
        damaged(start_s=0),
        damaged(passes=None),
        damaged(key=None),
        damaged(key__world_size="4"),
        damaged(key__model="other"),
    ],
)
def test_a_damaged_file_is_named_and_is_written_anew(tmp_path: Path, text: str) -> None:
    cache(tmp_path).keep(CHOICE)
    file_of(tmp_path).write_text(text)

    found, file, (trouble,) = cache(tmp_path).find(KEY)

    assert (found, file) == (None, None)
    assert str(file_of(tmp_path)) in trouble
    assert "written anew" in trouble
    cache(tmp_path).keep(CHOICE)
    assert cache(tmp_path).find(KEY)[0] == CHOICE


def test_a_link_or_a_pipe_in_its_place_is_not_read(tmp_path: Path) -> None:
    cache(tmp_path).keep(CHOICE)
    elsewhere = tmp_path / "elsewhere"
    file_of(tmp_path).rename(elsewhere)
    file_of(tmp_path).symlink_to(elsewhere)
    assert "symbolic link" in cache(tmp_path).find(KEY)[2][0]

    file_of(tmp_path).unlink()
    os.mkfifo(file_of(tmp_path))
    assert "no regular file" in cache(tmp_path).find(KEY)[2][0]


def test_without_a_home_it_says_why_nothing_is_kept() -> None:
    assert ChoiceFiles.of({}, None).keep(CHOICE) == (
        None,
        "there is no folder: neither HOME nor XDG_CACHE_HOME is a path",
    )
    assert ChoiceFiles.of({"HOME": "relative"}, None).find(KEY) == (None, None, [])


def test_a_folder_that_cannot_be_written_costs_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    kept, why = cache(tmp_path).keep(CHOICE)

    assert kept is None
    assert "directory" in why or "exists" in why


def test_the_runs_own_folder_comes_first_and_the_cache_gets_it_too(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "ELAUNCH_MEMORY": str(tmp_path)}
    files = ChoiceFiles.of(environ, tmp_path / "run")
    files.keep(CHOICE)
    for folder in ("run", "tuning", ".cache/elaunch/tuning"):
        assert (tmp_path / folder / KEY.file_name).exists()

    other = replace(CHOICE, settings=CommSettings(100, 1))
    ChoiceFiles([tmp_path / "run"], None).keep(other)
    assert files.find(KEY)[0] == other


def test_a_restart_finds_the_runs_newest_choice_at_another_number_of_workers(tmp_path: Path) -> None:
    files = ChoiceFiles([tmp_path / "run"], tmp_path / "cache")
    files.keep(CHOICE)
    files.keep(replace(CHOICE, at=2e9, settings=CommSettings(1, 1), key=replace(KEY, world_size=8)))
    files.keep(replace(CHOICE, at=3e9, key=replace(KEY, about="another batch size")))

    found = files.find_of_run(replace(KEY, world_size=2, nodes=1))

    assert found is not None
    assert found.settings == CommSettings(1, 1)
    assert ChoiceFiles([], tmp_path / "cache").find_of_run(replace(KEY, world_size=2)) is None


def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    cache(tmp_path).keep(CHOICE)
    for number in range(205):
        older = file_of(tmp_path).with_name(f"{number:032}")
        older.touch()
        os.utime(older, (number, number))

    cache(tmp_path).keep(CHOICE)

    left = {file.name for file in file_of(tmp_path).parent.iterdir()}
    assert len(left) == 200
    assert {KEY.file_name, f"{204:032}"} <= left
    assert f"{0:032}" not in left
