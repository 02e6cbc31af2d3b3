"""At its first line a program finds the same as in a fresh interpreter, however it was named, and at a warm start."""

from __future__ import annotations

import functools
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity import probe, probe_process
from tests.e2e.fidelity.ways import HERE, differences, look, looks, without_launchers
from tests.harness import FRESH, LIGHT, script
from tests.warm import own_place, run

ARGS = ("--lr", "0.1", "two words", "", "ü")
FORMS = {
    "script": ("train.py",),
    "module": ("-m", "train"),
    "package": ("-m", "pack"),
    "zip": ("pack.zip",),
}
# One way to name a program is tested with torch preloaded, as test_torch.py has it by default. The other ways preload a
# light module.
TORCH = ("--preload", "torch")
RUNS = {
    ("forked", "script"): TORCH,
    **{("light", form): LIGHT for form in FORMS if form != "script"},
    ("execed", "script"): FRESH,
}


@functools.cache
def _folder(base: Path) -> Path:
    """The probe under all its names, with its other half beside each."""
    text = (HERE / "probe.py").read_text()
    for folder in (base, base / "pack", base / "customized"):
        folder.mkdir(exist_ok=True)
    beside = (HERE / "probe_process.py").read_text()
    for folder in (base, base / "pack"):
        script(folder, beside, "probe_process.py")
    script(base, text)
    script(base / "pack", text, "__main__.py")
    (base / "pack" / "__init__.py").touch()
    script(base / "customized", "import sys\nsys.ran = [*getattr(sys, 'ran', []), __name__]\n", "sitecustomize.py")
    shutil.copy(base / "customized" / "sitecustomize.py", base / "customized" / "usercustomize.py")
    with zipfile.ZipFile(base / "pack.zip", "w") as archive:
        archive.writestr("__main__.py", text)
        archive.writestr("probe_process.py", beside)
    return base


class Seen:
    """The records of workers and of fresh interpreters; each program is run once."""

    def __init__(self, base: Path) -> None:
        self.folder = _folder(base)
        self.worker = functools.cache(self._worker)
        self.fresh = functools.cache(self._fresh)

    def _worker(self, how: tuple[str, ...], form: str) -> list[dict[str, Any]]:
        return looks(self.folder, how, *FORMS[form], *ARGS)

    def _fresh(self, form: str) -> dict[str, Any]:
        return look(self.folder, *FORMS[form], *ARGS)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    # Use a real path: with a symlink, `sys.path[0]` and `__file__` would differ.
    return Seen(tmp_path_factory.mktemp("start").resolve())


FACTS = (*probe_process.FACTS, *probe.FACTS)


@pytest.mark.parametrize(("way", "form"), RUNS, ids=["-".join(run) for run in RUNS])
def test_all_facts_are_as_in_a_fresh_interpreter(seen: Seen, way: str, form: str) -> None:
    fresh = seen.fresh(form)
    if way == "forked":
        # A known difference. If it no longer exists, remove its line in docs/fidelity.md too.
        hooks, others = fresh["import_hooks"]
        fresh = {**fresh, "import_hooks": [["HiddenModules", *hooks], others]}
    for worker in seen.worker(RUNS[way, form], form):
        assert differences(FACTS, worker, fresh) == {}


@pytest.mark.parametrize("name", probe.UNLIKE)
def test_what_is_drawn_differs_between_ranks_and_jobs(seen: Seen, name: str) -> None:
    runs = (("forked", "script"), ("light", "package"))
    workers = [worker for run in runs for worker in seen.worker(RUNS[run], run[1])]

    drawn = [worker[name] for worker in (*workers, seen.fresh("script"))]

    assert len({str(value) for value in drawn}) == len(drawn) == 5, drawn


def test_the_launchers_variables_are_there(seen: Seen) -> None:
    found = seen.worker(TORCH, "script")[1]["environ"]

    assert found.keys() - without_launchers(found).keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ELAUNCH_LINK"}


# A worker whose fork server was one that stayed.
THREADS = {"OMP_NUM_THREADS": "2"}
# In a C locale Python changes a variable, and the user has a sitecustomize.
CUSTOM = "C locale and own customize"
WARM_FORMS = ("script", CUSTOM)


def warm_facts(folder: Path, form: tuple[str, ...], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """What two workers of a warm start wrote down. The run before had other arguments."""
    words = ("-v", *LIGHT, "--warm", "--nproc-per-node", "2", "--max-restarts", "0", *form)
    first = run(folder, *words, "--some", "other arguments, which are longer", env=env)
    assert "a warm fork server stays" in first.stderr, first.stderr
    ended = run(folder, *words, *ARGS, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "warm start: from the warm fork server left at" in ended.stderr, ended.stderr
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]


class WarmSeen:
    """The records of workers of warm starts, and of fresh interpreters; each program is run once."""

    def __init__(self, base: Path) -> None:
        self._folder = _folder(base)
        self.workers = functools.cache(self._workers)
        self.fresh = functools.cache(self._fresh)

    def _workers(self, form: str) -> list[dict[str, Any]]:
        return warm_facts(self._folder, *self._how(form))

    def _fresh(self, form: str) -> dict[str, Any]:
        words, env = self._how(form)
        return look(self._folder, *words, *ARGS, env=env)

    def _how(self, form: str) -> tuple[tuple[str, ...], dict[str, str]]:
        if form != CUSTOM:
            return FORMS[form], THREADS
        paths = {"PYTHONPATH": os.fspath(self._folder / "customized")}
        return FORMS["script"], {**THREADS, "LANG": "C", "LC_ALL": "", "LC_CTYPE": "", **paths}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmSeen]:
    base = tmp_path_factory.mktemp("warm").resolve()
    with own_place(base / "run"), pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", os.fspath(base / "tmp"))
        (base / "tmp").mkdir()
        yield WarmSeen(base)


@pytest.mark.parametrize("form", WARM_FORMS)
def test_all_facts_of_a_warm_start_are_as_in_a_fresh_interpreter(warm: WarmSeen, form: str) -> None:
    for worker in warm.workers(form):
        ours, fresh = (
            {**facts, "command_line": facts["command_line"].rstrip("\0")} for facts in (worker, warm.fresh(form))
        )
        assert differences(FACTS, ours, fresh) == {}


@pytest.mark.parametrize("name", probe.UNLIKE)
def test_what_is_drawn_after_a_warm_start_differs_between_ranks_and_jobs(warm: WarmSeen, name: str) -> None:
    drawn = [worker[name] for form in WARM_FORMS for worker in warm.workers(form)]

    assert len({str(value) for value in drawn}) == len(drawn) == 4, drawn
