"""After `import torch` a forked worker has what a fresh interpreter has, threads that really work included."""

from __future__ import annotations

import ast
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity import probe, probe_process
from tests.e2e.fidelity.ways import FORKED, HERE, differences, look, looks
from tests.harness import slow

THREADS: dict[str, dict[str, str]] = {
    "by default": {},
    "OMP 2": {"OMP_NUM_THREADS": "2"},
    "OMP 2, BLAS 1": {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}

each_threads = pytest.mark.parametrize("threads", ["by default", slow("OMP 2"), slow("OMP 2, BLAS 1")])


def _marked(mark: str) -> list[str]:
    """The facts that probe_torch.py has, by its source: reading them must not import torch here."""
    tree = ast.parse((HERE / "probe_torch.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if any(isinstance(d, ast.Name) and d.id == mark for d in f.decorator_list)]


class Seen:
    """The records, each of one run; `threads` names a row of THREADS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("probe.py", "probe_process.py"):
            shutil.copy(HERE / name, folder)
        shutil.copy(HERE / "probe_torch.py", folder / "train.py")
        self.worker = functools.cache(self._worker)
        self.fresh = functools.cache(self._fresh)

    def _worker(self, how: tuple[str, ...], threads: str) -> list[dict[str, Any]]:
        # The compiler is a second more.
        how = how if threads == "by default" else ("--preload", "torch")
        return looks(self.folder, how, *_command(threads), env=THREADS[threads])

    def _fresh(self, threads: str) -> dict[str, Any]:
        return look(self.folder, *_command(threads), env=THREADS[threads])


def _command(threads: str) -> tuple[str, ...]:
    return ("train.py", "--compiler") if threads == "by default" else ("train.py",)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("torch").resolve())


WORK = [name for name in _marked("fact") if name.startswith("threads_that_work")]
KNOWN = ("torch_loggers", "warning_filters")
FACTS = [n for n in (*probe_process.FACTS, *probe.FACTS, *_marked("fact")) if n not in (*WORK, *KNOWN)]


# With other threads torch is preloaded without torch._dynamo, as for a program that does not use it.
@pytest.mark.parametrize("threads", ["by default", slow("OMP 2")])
def test_all_facts_are_as_in_a_fresh_interpreter(seen: Seen, threads: str) -> None:
    for worker in seen.worker(FORKED, threads):
        assert differences(FACTS, worker, seen.fresh(threads)) == {}


@pytest.mark.parametrize("name", ["blas_threads", "torch_threads"])
@each_threads
def test_the_libraries_have_as_many_threads_as_in_a_fresh_interpreter(seen: Seen, threads: str, name: str) -> None:
    for worker in seen.worker(FORKED, threads):
        assert worker[name] == seen.fresh(threads)[name]


@pytest.mark.parametrize("name", _marked("unlike"))
def test_what_is_drawn_without_a_seed_differs_between_ranks_and_from_a_fresh_interpreter(seen: Seen, name: str) -> None:
    drawn = [worker[name] for worker in (*seen.worker(FORKED, "by default"), seen.fresh("by default"))]

    assert len({str(value) for value in drawn}) == len(drawn) == 3


def _differences(seen: Seen) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The differences that two forked workers found, and those of a fresh interpreter."""
    workers = seen.worker(FORKED, "by default")
    return [worker["differences"] for worker in workers], seen.fresh("by default")["differences"]


def test_the_import_is_over_before_it_begins(seen: Seen) -> None:
    workers, fresh = _differences(seen)

    assert max(worker["import took"] for worker in workers) < 0.1 * fresh["import took"]
    assert not any(worker["cache folder"] for worker in workers)
    assert fresh["cache folder"]
