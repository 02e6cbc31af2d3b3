"""A worker whose fork server was forked from one that stayed is as a fresh interpreter, too."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity import probe, probe_process, test_ends, test_start, test_torch
from tests.e2e.fidelity.turns import Turns, taken
from tests.e2e.fidelity.ways import LIGHT, look, with_crash_stack, without_launchers
from tests.harness import script, slow, wait_for
from tests.warm import own_place, run, states

WARM = (*LIGHT, "--warm", "-v")
THREADS = {"OMP_NUM_THREADS": "2"}
FORMS = ("script", slow("path"), "module", slow("folder"), "zip")
# Programs whose ends depend on the command line, the streams, the signals or on how Python ends.
ENDS = ("chained", "printed stack", "last exception", "exit 3", "SIGINT", "SIGTERM", "abort", "atexit order",
        "destructor", "stdin", "forked child", "exec", "thread after an error")  # fmt: skip


def leave(folder: Path, *words: str, env: Mapping[str, str] = THREADS) -> None:
    """A job with other arguments, in another folder and with another environment, leaves a fork server."""
    folder.mkdir(exist_ok=True)
    script(folder, "", "nothing.py")
    before = {each.get("pid") for each in states()}
    ended = run(folder, *words, "--some", "arguments", env={**env, "OF_THE_FIRST": "1"})
    assert "a fork server stays" in ended.stderr, ended.stderr
    wait_for(lambda: {each["pid"] for each in states() if "pid" in each} - before, "a fork server that stays")


def looks(folder: Path, how: tuple[str, ...], *words: str, env: Mapping[str, str] = THREADS) -> list[dict[str, Any]]:
    """What two workers of a warm start wrote down."""
    ended = run(folder, "-v", *how, "--nproc-per-node", "2", "--max-restarts", "0", *words, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "warm start: from the fork server that stayed since" in ended.stderr, ended.stderr
    return [json.loads((folder / f"facts{rank}.json").read_text()) for rank in range(2)]


class Seen:
    """The records of workers and of fresh interpreters; each program is run once."""

    def __init__(self, base: Path) -> None:
        self.folder = test_start._folder(base)
        self.workers = functools.cache(lambda form: looks(base, WARM, *test_start.FORMS[form], *test_start.ARGS))
        self.fresh = functools.cache(lambda form: look(base, *test_start.FORMS[form], *test_start.ARGS, env=THREADS))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    base = tmp_path_factory.mktemp("warm").resolve()
    with own_place(base / "run"), pytest.MonkeyPatch.context() as patched:
        # torch reads it while it is imported.
        patched.setenv("TMPDIR", os.fspath(base / "tmp"))
        (base / "tmp").mkdir()
        leave(tmp_path_factory.mktemp("elsewhere"), *WARM, "nothing.py")
        leave(tmp_path_factory.mktemp("elsewhere"), *WARM, "-m", "nothing")
        yield Seen(base)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*probe_process.FACTS, *probe.FACTS])
def test_a_fact_is_as_in_a_fresh_interpreter(seen: Seen, form: str, name: str) -> None:
    for worker in seen.workers(form):
        test_start._equal(name, worker, seen.fresh(form))


@pytest.fixture(scope="module")
def in_c_locale(seen: Seen) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records in a C locale, in which Python changes a variable, with a sitecustomize that the user has."""
    customized = {"PYTHONPATH": os.fspath(seen.folder / "customized")}
    env = {**THREADS, **test_start.VARIANTS["C locale and own customize"], **customized}
    command = (*test_start.FORMS["script"], *test_start.ARGS)
    with own_place(seen.folder / "run in C"):
        leave(seen.folder / "elsewhere in C", *WARM, "nothing.py", env=env)
        return looks(seen.folder, WARM, *command, env=env), look(seen.folder, *command, env=env)


@pytest.mark.parametrize("name", [*probe_process.FACTS, *probe.FACTS])
def test_a_fact_follows_the_locale_and_the_users_sitecustomize(
    in_c_locale: tuple[list[dict[str, Any]], dict[str, Any]], name: str
) -> None:
    workers, fresh = in_c_locale
    for worker in workers:
        test_start._equal(name, worker, fresh)


@pytest.mark.parametrize("name", probe.UNLIKE)
def test_what_is_drawn_differs_between_ranks_and_jobs(seen: Seen, name: str) -> None:
    drawn = [worker[name] for form in ("script", "zip") for worker in seen.workers(form)]

    assert len({str(value) for value in drawn}) == len(drawn) == 4, drawn


@pytest.fixture(scope="module")
def turns(seen: Seen) -> Turns:
    folder = seen.folder / "turns"
    for path, content in test_ends.HELPERS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return taken(folder, WARM, {name: test_ends.ENDS[name] for name in ENDS}, env=THREADS)


@pytest.mark.parametrize("name", ENDS)
def test_a_worker_ends_as_a_fresh_interpreter_does(turns: Turns, name: str) -> None:
    worker, fresh = turns.both(name)

    assert turns.said.count("warm start:") == 2, turns.said
    assert (worker.code, worker.out) == (fresh.code, fresh.out)
    assert test_ends._ADDRESS.sub(b"", worker.err) == test_ends._ADDRESS.sub(b"", fresh.err)


class SeenWithTorch(test_torch.Seen):
    """The records of test_torch.py, of workers from a warm start."""

    def _worker(self, how: tuple[str, ...], threads: str) -> list[dict[str, Any]]:
        return looks(self.folder, ("--preload", "torch", "--warm"), *test_torch._command(threads))

    def _fresh(self, threads: str) -> dict[str, Any]:
        return look(self.folder, *test_torch._command(threads), env=THREADS)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeenWithTorch]:
    base = tmp_path_factory.mktemp("torch").resolve()
    with own_place(base / "run"), pytest.MonkeyPatch.context() as patched:
        # torch reads it while it is imported.
        patched.setenv("TMPDIR", os.fspath(base / "tmp"))
        (base / "tmp").mkdir()
        leave(tmp_path_factory.mktemp("elsewhere"), "--preload", "torch", "--warm", "nothing.py")
        yield SeenWithTorch(base)


@pytest.mark.parametrize("name", [slow(name) for name in (*test_torch.FACTS, "blas_threads", "torch_threads")])
def test_after_its_import_of_torch_a_worker_is_as_a_fresh_interpreter(with_torch: SeenWithTorch, name: str) -> None:
    for worker in with_torch.worker((), "by default"):
        ours = without_launchers(worker[name]) if name.startswith(("environ", "torch_var")) else worker[name]

        assert ours == with_crash_stack(name, with_torch.fresh("by default")[name])


def test_processes_that_a_program_spawns_look_for_its_modules_where_it_was_started(seen: Seen) -> None:
    folder = seen.folder / "spawning"
    folder.mkdir()
    script(folder, "def f():\n    return 'from beside'\n", "beside.py")
    script(
        folder,
        "import multiprocessing as mp, multiprocessing.process as p, os\nfrom beside import f\n"
        "if __name__ == '__main__':\n"
        "    print(p.ORIGINAL_DIR == os.getcwd(), mp.get_context('spawn').Pool(1).apply(f))",
    )

    how = ("--preload-only", "json,multiprocessing.process", "--warm", "-v")
    leave(seen.folder / "elsewhere too", *how, "nothing.py")

    ended = run(folder, *how, "train.py", env=THREADS)

    assert "warm start:" in ended.stderr, ended.stderr
    assert ended.stdout == "True from beside\n"
