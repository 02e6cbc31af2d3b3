"""What is remembered of a program's imports is a hint: a file that is of no use is as good as none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elaunch.agent.forkserver import learned_file
from elaunch.agent.forkserver.learned import Learned, Named
from elaunch.agent.forkserver.learned_file import read, state_of_packages, write
from elaunch.agent.forkserver.selection import Cost, Selection

SELECTION = Selection(("a", "b.c"), ("d",), ("d starts a thread",), 0.5, (Cost("a", 1.5),))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "elaunch" / "imports" / "0123"


def known() -> Learned:
    return Learned((Named("a", SELECTION),), SELECTION, ("HF_HOME",), ("torch",), "a state", state_of_packages())


def test_what_is_written_is_read_and_nobody_else_can_read_it(file: Path) -> None:
    write(file, known())

    assert read(file) == known()
    assert [file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777] == [0o600, 0o700]
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"program": 1}', '{"program": {"entries": "a"}}', "\0", "x" * 5_000_000]
)
def test_a_damaged_file_is_as_good_as_none(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)

    assert read(file) == Learned(packages=state_of_packages())


def test_it_is_forgotten_when_packages_change(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    write(file, known())
    (packages / "__pycache__").mkdir()
    before = read(file)

    (packages / "new-1.0.dist-info").mkdir()

    assert before.program == SELECTION
    assert read(file) == Learned(packages=state_of_packages())


def test_a_folder_that_cannot_be_written_is_no_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")

    write(file, known())

    assert read(file).program == Selection()


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
STRANGER = 12345


@ROOT_ONLY
def test_root_makes_nothing_in_the_home_of_a_user(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, STRANGER, STRANGER)

    write(home / ".cache" / "elaunch" / "imports" / "0123", known())

    assert list(home.iterdir()) == []


@ROOT_ONLY
@pytest.mark.parametrize("linked", ["elaunch", "elaunch/imports"])
def test_a_folder_to_which_a_stranger_has_made_a_link_keeps_its_files(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    monkeypatch.setattr(learned_file, "_FILES_MAX", 1)
    own = tmp_path / "own"
    (own / "imports").mkdir(parents=True)
    for folder in (own, own / "imports"):
        (folder / "thesis.tex").write_text("mine")
    link = file.parent.parent.parent / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(own)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)

    write(file, known())
    write(file.with_name("4567"), known())

    assert {str(path.relative_to(own)) for path in own.rglob("*")} == {"imports", "thesis.tex", "imports/thesis.tex"}


def test_the_oldest_files_go(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_file, "_FILES_MAX", 2)
    for number in range(4):
        path = file.with_name(str(number))
        write(path, known())
        os.utime(path, (number, number))

    write(file, known())

    assert {path.name for path in file.parent.iterdir()} == {"3", "0123"}
