"""agent.workers.cut_libraries: libraries in torch's caches that a killed compiler has left without content."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.agent.workers import held_files
from elaunch.agent.workers.cut_libraries import CutLibraries, remove_cut

LINKS = """
import sys, time
with open(sys.argv[1], "wb"):
    print("links", flush=True)
    time.sleep(600)
"""


def look(libraries: CutLibraries, say: Callable[[str], None]) -> None:
    remove_cut(libraries.find(), say)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "ab"
    folder.mkdir(parents=True)
    return folder / "cabc.main.so"


@pytest.mark.parametrize("content", [b"", b"\0" * 4096])
def test_a_library_without_content_is_removed_and_named(library: Path, content: bytes) -> None:
    said: list[str] = []
    library.write_bytes(content)

    look(CutLibraries(str(library.parents[1]), 1), said.append)

    assert not library.exists()
    (sentence,) = said
    assert sentence.startswith(f"removed {library}: a compiler that was killed")


def test_a_library_that_a_compiler_writes_stays_until_that_is_dead(library: Path) -> None:
    said: list[str] = []
    command = [sys.executable, "-S", "-c", LINKS, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as linker:
        assert linker.stdout
        assert linker.stdout.readline() == b"links\n"
        look(CutLibraries(str(library.parents[1]), 1), said.append)
        was_there = library.exists()
        linker.kill()
    assert was_there
    assert not said

    look(CutLibraries(str(library.parents[1]), 1), said.append)

    assert not library.exists()
    assert len(said) == 1


def test_a_whole_library_and_other_files_stay(library: Path) -> None:
    shutil.copy(sys.executable, library)
    empty = library.with_suffix(".cpp")
    empty.touch()

    look(CutLibraries(str(library.parents[1]), 1), pytest.fail)

    assert library.exists()
    assert empty.exists()


def test_nothing_is_looked_for_deeper_or_behind_a_link(library: Path, tmp_path: Path) -> None:
    library.touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(library.parent)
    (root / "link.so").symlink_to(library)

    look(CutLibraries(str(root), 1), pytest.fail)
    look(CutLibraries(str(tmp_path), 1), pytest.fail)

    assert library.exists()


def test_a_library_on_a_disk_that_hosts_share_stays(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.touch()
    monkeypatch.setattr(held_files, "_LOCAL", frozenset())

    look(CutLibraries(str(library.parents[1]), 1), pytest.fail)

    assert library.exists()


def test_another_users_cache_is_left_alone(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    look(CutLibraries(str(library.parents[1]), 1), pytest.fail)

    assert library.exists()


def test_a_folder_is_looked_into_again_only_if_something_was_made_in_it(library: Path) -> None:
    said: list[str] = []
    other = library.parents[1] / "cd" / "cdef.main.so"
    other.parent.mkdir()
    for path in (library, other):
        shutil.copy(sys.executable, path)
        settled(path.parent)
    libraries = CutLibraries(str(library.parents[1]), 1)
    look(libraries, pytest.fail)

    # To write into a file that is there does not change its folder.
    other.write_bytes(b"")
    library.with_name("cnew.main.so").touch()
    look(libraries, said.append)
    kept = other.exists()
    look(CutLibraries(str(library.parents[1]), 1), said.append)

    assert kept
    assert [sentence.split(":")[0] for sentence in said] == [
        f"removed {library.with_name('cnew.main.so')}",
        f"removed {other}",
    ]


def test_a_library_that_a_compiler_wrote_at_the_last_look_is_looked_at_again(library: Path) -> None:
    said: list[str] = []
    libraries = CutLibraries(str(library.parents[1]), 1)
    with library.open("wb"):
        settled(library.parent)
        look(libraries, pytest.fail)

    look(libraries, said.append)

    assert not library.exists()
    assert len(said) == 1


def settled(folder: Path) -> None:
    """The folder as if its last change was long ago."""
    os.utime(folder, (1e9, 1e9))
