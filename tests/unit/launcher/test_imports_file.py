"""Where it is remembered what a program imports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.launcher.imports_file import imports_file
from elaunch.launcher.options.options import parse
from elaunch.launcher.resources import HostResources

HOST = HostResources(cpus=16, cores=8, gpus=0, python="/usr/bin/python3")
HOME = {"HOME": "/home/me"}


def file_of(*argv: str, host: HostResources = HOST, **environ: str) -> Path | None:
    return imports_file(parse(argv, environ), {**HOME, **environ}, host)


def test_each_program_interpreter_and_preload_has_a_file_of_its_own() -> None:
    files = [
        file_of("train.py"),
        file_of("other.py"),
        file_of("-m", "train.py"),
        file_of("--preload", "hydra", "train.py"),
        file_of("train.py", host=replace(HOST, python="/venv/bin/python3")),
        file_of("train.py", host=replace(HOST, python_options=("-O",))),
    ]

    assert len({*files}) == len(files)
    assert None not in files


def test_its_arguments_and_how_its_path_is_spelled_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)

    files = {
        file_of("train.py"),
        file_of("train.py", "--name", "run 7"),
        file_of("--nproc-per-node", "2", "./train.py"),
        file_of(f"{tmp_path}/link/train.py"),
    }

    assert len(files) == 1


def test_each_function_has_a_file_of_its_own() -> None:
    """One function may import transformers; the job of another need not wait for that."""
    worker = ("-m", "elaunch.launcher.functions.worker")

    files = {file_of(*worker, name, "${local_rank}") for name in ("train", "evaluate")}

    assert len(files) == 2


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, "/home/me/.cache"),
        ({"XDG_CACHE_HOME": "/scratch/me"}, "/scratch/me"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache"),
        ({"HOME": ""}, None),
    ],
)
def test_it_is_in_the_users_cache_folder(environ: dict[str, str], folder: str | None) -> None:
    file = file_of("train.py", **environ)

    assert (str(file.parent) if file else None) == (f"{folder}/elaunch/imports" if folder else None)
