"""A change of what a process has loaded is seen, and a change of anything else is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from elaunch.agent.forkserver.warm.files import Loaded, libraries, names_in
from elaunch.agent.forkserver.warm.interpreter import absolute
from tests.harness import RUN_LIMIT_S


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Loaded]:
    """A folder on sys.path with a loaded module, and what is known of it."""
    file = tmp_path / "heavy.py"
    file.write_text("WORD = 1\n")
    monkeypatch.setattr(sys, "path", [os.fspath(tmp_path), os.fspath(tmp_path / "later")])
    module = ModuleType("heavy")
    module.__file__ = os.fspath(file)
    return file, Loaded.now({"heavy": module, "other.part": ModuleType("other.part")})


def test_files_that_nobody_has_loaded_may_come(package: tuple[Path, Loaded]) -> None:
    file, loaded = package
    (file.parent / "results.csv").touch()
    (file.parent / "train.py").touch()

    assert loaded.change() == ""


def test_a_written_a_touched_and_a_removed_file_are_seen(package: tuple[Path, Loaded]) -> None:
    file, loaded = package

    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    touched = loaded.change()
    file.unlink()

    assert touched == loaded.change() == f"{file} has changed"


def test_a_written_archive_with_a_module_in_it_is_seen(tmp_path: Path) -> None:
    archive = tmp_path / "wheels.zip"
    archive.write_text("one")
    module = ModuleType("heavy")
    module.__file__ = os.fspath(archive / "heavy" / "__init__.py")
    loaded = Loaded.now({"heavy": module})

    archive.write_text("another")

    assert loaded.change() == f"{archive} has changed"


def test_a_file_that_would_be_found_first_is_seen(package: tuple[Path, Loaded]) -> None:
    file, loaded = package
    (file.parent / "other").mkdir()

    assert loaded.change() == f"{file.parent / 'other'} was added or removed"


def test_a_new_package_is_seen(package: tuple[Path, Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    _, loaded = package
    monkeypatch.setattr("elaunch.agent.forkserver.warm.files.state_of_packages", lambda: "other")

    assert loaded.change() == "packages were installed, upgraded or removed"


def test_a_file_that_was_written_while_it_was_imported_is_seen(package: tuple[Path, Loaded]) -> None:
    file, loaded = package
    before_ns = file.stat().st_mtime_ns

    assert loaded.newer_than(before_ns - 1) == os.fspath(file)
    assert loaded.newer_than(max(stamp[0] for stamp in loaded.stamps.values())) == ""


def test_a_date_in_the_future_is_not_taken_for_a_write(package: tuple[Path, Loaded]) -> None:
    file, _ = package
    module = ModuleType("heavy")
    module.__file__ = os.fspath(file)
    before_ns = max(stamp[0] for stamp in Loaded.now({}).stamps.values())
    os.utime(file, (0, time.time() + 86400))

    assert Loaded.now({"heavy": module}).newer_than(before_ns) == ""


def test_the_names_of_variables_are_found_in_libraries(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_bytes(b"no ELF \0NOT_FOUND\0")

    names = names_in([*libraries(), os.fspath(tmp_path / "text.so"), os.fspath(tmp_path / "missing.so")])

    # libc's, for locales.
    assert "LOCPATH" in names or "LANGUAGE" in names
    assert "NOT_FOUND" not in names


@pytest.mark.parametrize("name", ["a.py", "./a.py", "../a.py", "x/../a.py", "/tmp/./a.py", "ü b.py"])
def test_a_path_is_made_absolute_as_python_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = tmp_path / "here"
    (place / "x").mkdir(parents=True)
    monkeypatch.chdir(place)
    path = Path(name)
    if not path.is_absolute():
        path.write_text("print(__file__)")
        said = subprocess.run(
            [sys.executable, name], stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
        ).stdout.strip()
        assert absolute(name) == said
    assert absolute("/tmp/./a.py") == "/tmp/./a.py"
