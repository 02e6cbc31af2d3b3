"""The names of modules and files in README.md and docs/ are names of today."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest

from tests.harness import REPOSITORY

PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")])
FOLDERS = ("launcher", "agent", "rendezvous", "trainer", "bench", "tests", "deploy", "docs", "src", "examples")
# Files of a user's, of torch's and of a run's own, as the pages call them.
OTHERS = {
    "train.py",
    "script.py",
    "sitecustomize.py",
    "config.yaml",
    "job.yaml",
    "upload.sh",
    "notify.sh",
    # nanoGPT's.
    "configurator.py",
    "prepare.py",
    "kustomization.yaml",
}


def ids(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_each_dotted_name_of_elaunch_is_there(page: Path) -> None:
    names = set(re.findall(r"\belaunch(?:\.[A-Za-z_]\w*)+", page.read_text()))

    assert sorted(name for name in names if not _is_there(name)) == []


def _is_there(name: str) -> bool:
    """Whether `name` is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("elaunch"):
                # A module for a library that is not installed here.
                return count == len(parts)
            continue
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_each_path_of_the_repository_is_there(page: Path) -> None:
    paths = re.findall(rf"(?<![\w./<>~$:-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)", page.read_text())

    assert sorted({path for path in paths if not _exists(path)}) == []


def _exists(path: str) -> bool:
    """Whether it is there; a name with a `*` stands for any of those that fit."""
    path = path.rstrip(".")
    return (REPOSITORY / path).exists() if "*" not in path else any(REPOSITORY.glob(path))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_each_file_that_is_named_without_its_folder_is_somewhere(page: Path) -> None:
    named = set(re.findall(r"`([\w-]+\.(?:py|sh|sbatch|yaml))`", page.read_text()))

    assert sorted(named - _files() - OTHERS) == []


@functools.cache
def _files() -> set[str]:
    """The names of all files in the repository's folders."""
    return {path.name for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.is_file()}


def test_a_name_that_is_gone_would_be_found() -> None:
    assert not _is_there("elaunch.agent.forkserver.boot")
    assert not _is_there("elaunch.trainer.Keeper.no_such_thing")
    assert _is_there("elaunch.trainer.Keeper")
    assert not _exists("rendezvous/rules/exchange.py")
