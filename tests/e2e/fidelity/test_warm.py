"""A worker whose fork server was forked from one that stayed is as a fresh interpreter, too."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity import probe, test_start
from tests.e2e.fidelity.ways import differences, look
from tests.harness import LIGHT
from tests.warm import own_place, run

THREADS = {"OMP_NUM_THREADS": "2"}
# In a C locale Python changes a variable, and the user has a sitecustomize.
CUSTOM = "C locale and own customize"
FORMS = ("script", CUSTOM)


def looks(folder: Path, form: tuple[str, ...], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """What two workers of a warm start wrote down. The run before had other arguments."""
    words = ("-v", *LIGHT, "--warm", "--nproc-per-node", "2", "--max-restarts", "0", *form)
    first = run(folder, *words, "--some", "other arguments, which are longer", env=env)
    assert "a fork server stays" in first.stderr, first.stderr
    ended = run(folder, *words, *test_start.ARGS, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "warm start: from the fork server that stayed since" in ended.stderr, ended.stderr
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]


class Seen:
    """The records of workers and of fresh interpreters; each program is run once."""

    def __init__(self, base: Path) -> None:
        self._folder = test_start._folder(base)
        self.workers = functools.cache(self._workers)
        self.fresh = functools.cache(self._fresh)

    def _workers(self, form: str) -> list[dict[str, Any]]:
        return looks(self._folder, *self._how(form))

    def _fresh(self, form: str) -> dict[str, Any]:
        words, env = self._how(form)
        return look(self._folder, *words, *test_start.ARGS, env=env)

    def _how(self, form: str) -> tuple[tuple[str, ...], dict[str, str]]:
        if form != CUSTOM:
            return test_start.FORMS[form], THREADS
        paths = {"PYTHONPATH": os.fspath(self._folder / "customized")}
        return test_start.FORMS["script"], {**THREADS, "LANG": "C", "LC_ALL": "", "LC_CTYPE": "", **paths}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    base = tmp_path_factory.mktemp("warm").resolve()
    with own_place(base / "run"), pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", os.fspath(base / "tmp"))
        (base / "tmp").mkdir()
        yield Seen(base)


@pytest.mark.parametrize("form", FORMS)
def test_all_facts_are_as_in_a_fresh_interpreter(seen: Seen, form: str) -> None:
    for worker in seen.workers(form):
        ours, fresh = (
            {**facts, "command_line": facts["command_line"].rstrip("\0")} for facts in (worker, seen.fresh(form))
        )
        assert differences(test_start.FACTS, ours, fresh) == {}


@pytest.mark.parametrize("name", probe.UNLIKE)
def test_what_is_drawn_differs_between_ranks_and_jobs(seen: Seen, name: str) -> None:
    drawn = [worker[name] for form in FORMS for worker in seen.workers(form)]

    assert len({str(value) for value in drawn}) == len(drawn) == 4, drawn
