"""agent.workers.cut_libraries: libraries in torch's caches that a killed compiler has left without content."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.agent.workers import held_files
from elaunch.agent.workers.cut_libraries import remove_cut

LINKS = """
import sys, time
with open(sys.argv[1], "wb"):
    print("links", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "ab"
    folder.mkdir(parents=True)
    return folder / "cabc.main.so"


@pytest.mark.parametrize("content", [b"", b"\0" * 4096])
def test_a_library_without_content_is_removed_and_named(library: Path, content: bytes) -> None:
    said: list[str] = []
    library.write_bytes(content)

    remove_cut(str(library.parents[1]), 1, said.append)

    assert not library.exists()
    (sentence,) = said
    assert sentence.startswith(f"removed {library}: a compiler that was killed")


def test_a_library_that_a_compiler_writes_stays_until_that_is_dead(library: Path) -> None:
    said: list[str] = []
    command = [sys.executable, "-S", "-c", LINKS, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as linker:
        assert linker.stdout
        assert linker.stdout.readline() == b"links\n"
        remove_cut(str(library.parents[1]), 1, said.append)
        was_there = library.exists()
        linker.kill()
    assert was_there
    assert not said

    remove_cut(str(library.parents[1]), 1, said.append)

    assert not library.exists()
    assert len(said) == 1


def test_a_whole_library_and_other_files_stay(library: Path) -> None:
    shutil.copy(sys.executable, library)
    empty = library.with_suffix(".cpp")
    empty.touch()

    remove_cut(str(library.parents[1]), 1, pytest.fail)

    assert library.exists()
    assert empty.exists()


def test_nothing_is_looked_for_deeper_or_behind_a_link(library: Path, tmp_path: Path) -> None:
    library.touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(library.parent)
    (root / "link.so").symlink_to(library)

    remove_cut(str(root), 1, pytest.fail)
    remove_cut(str(tmp_path), 1, pytest.fail)

    assert library.exists()


def test_a_library_on_a_disk_that_hosts_share_stays(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.touch()
    monkeypatch.setattr(held_files, "_LOCAL", frozenset())

    remove_cut(str(library.parents[1]), 1, pytest.fail)

    assert library.exists()


def test_another_users_cache_is_left_alone(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    remove_cut(str(library.parents[1]), 1, pytest.fail)

    assert library.exists()
