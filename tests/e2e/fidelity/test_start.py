"""At its first line a program finds the same as in a fresh interpreter, in whichever way it was named."""

from __future__ import annotations

import functools
import json
import os
import pty
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity import probe, probe_process
from tests.e2e.fidelity.ways import EXECED, HERE, LIGHT, look, looks, share, with_crash_stack, without_launchers
from tests.harness import COMMAND, environment, script

ARGS = ("--lr", "0.1", "two words", "", "ü")
FORMS = {
    "script": ("train.py",),
    "path": ("./sub/../train.py",),
    "module": ("-m", "train"),
    "package": ("-m", "pack"),
    "submodule": ("-m", "pack.inner"),
    "folder": ("pack",),
    "zip": ("pack.zip",),
}
# For the slow suite: a script by another path is one too, and a module of a package is a module.
RARE_FORMS = ("path", "submodule")
# One way to name a program is tested with torch preloaded, as test_torch.py has it by default. The other ways preload a
# light module.
TORCH = ("--preload", "torch")
RUNS = {
    ("forked", "script"): TORCH,
    **{("light", form): LIGHT for form in FORMS if form != "script"},
    **{("execed", form): EXECED for form in ("script", "module")},
}

# The variables that Python itself and its start-up files read, all at once.
PYTHONS_OWN = {
    "PYTHONWARNINGS": "error::UserWarning,ignore::ResourceWarning",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONOPTIMIZE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONSAFEPATH": "1",
    "PYTHONBREAKPOINT": "0",
    "PYTHONUTF8": "1",
}
VARIANTS = {
    # PYTHONTRACEMALLOC is not among them: every import under it takes four times as long.
    "PYTHON variables": PYTHONS_OWN,
    "C locale and own customize": {"LANG": "C", "LC_ALL": "", "LC_CTYPE": "", "PYTHONPATH": "customized"},
}


@functools.cache
def _folder(base: Path) -> Path:
    """The probe under all its names, with its other half beside each."""
    text = (HERE / "probe.py").read_text()
    for folder in (base, base / "pack", base / "sub", base / "customized"):
        folder.mkdir(exist_ok=True)
    beside = (HERE / "probe_process.py").read_text()
    for folder in (base, base / "pack"):
        script(folder, beside, "probe_process.py")
    script(base, text)
    script(base / "pack", text, "__main__.py")
    script(base / "pack", text, "inner.py")
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

    def _worker(self, how: tuple[str, ...], form: str, variant: str = "") -> list[dict[str, Any]]:
        return looks(self.folder, how, *FORMS[form], *ARGS, env=self._variables(variant))

    def _fresh(self, form: str, variant: str = "") -> dict[str, Any]:
        return look(self.folder, *FORMS[form], *ARGS, env=self._variables(variant))

    def _variables(self, variant: str) -> dict[str, str]:
        variables = VARIANTS.get(variant, {})
        paths = {"PYTHONPATH": str(self.folder / "customized")} if "PYTHONPATH" in variables else {}
        if variables.get("PYTHONSAFEPATH"):
            # Without the script's folder on sys.path, the probe finds its other half by PYTHONPATH.
            paths = {"PYTHONPATH": str(self.folder)}
        return {**variables, **paths}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    # Use a real path: with a symlink, `sys.path[0]` and `__file__` would differ.
    return Seen(tmp_path_factory.mktemp("start").resolve())


def _params(where: str, *values: str) -> list[Any]:
    """A row for each fact."""
    marks = [pytest.mark.slow] if not {*RARE_FORMS}.isdisjoint(values) else []
    facts = (*probe_process.FACTS, *probe.FACTS)
    return [pytest.param(*values, name, id=f"{where}-{name}", marks=marks) for name in facts]


def _equal(name: str, worker: dict[str, Any], fresh: dict[str, Any]) -> None:
    ours, theirs = worker[name], with_crash_stack(name, fresh[name])
    if name.startswith("environ"):
        # Drop the launcher's variables. Those that the test set for the fresh process too are in both.
        ours = without_launchers(ours)
    if name == "import_hooks":
        # One of elaunch's waits for torch, where that is not preloaded.
        ours = [[hook for hook in ours[0] if hook != "_Finder"], ours[1]]
    assert ours == theirs


# Known differences, with the worker's value. If one no longer exists, remove its line in docs/fidelity.md too.
KNOWN = {("forked", "script", "import_hooks"): lambda hooks: [["HiddenModules", *hooks[0]], hooks[1]]}


@pytest.mark.parametrize(("way", "form", "name"), [p for run in RUNS for p in _params("-".join(run), *run)])
def test_a_fact_is_as_in_a_fresh_interpreter(seen: Seen, way: str, form: str, name: str) -> None:
    fresh = seen.fresh(form)
    if known := KNOWN.get((way, form, name)):
        fresh = {**fresh, name: known(fresh[name])}
    for worker in seen.worker(RUNS[way, form], form):
        _equal(name, worker, fresh)


@pytest.mark.parametrize(("variant", "name"), [p for variant in VARIANTS for p in _params(variant, variant)])
def test_a_fact_follows_pythons_own_variables(seen: Seen, variant: str, name: str) -> None:
    for worker in seen.worker(LIGHT, "script", variant):
        _equal(name, worker, seen.fresh("script", variant))


@pytest.mark.parametrize("name", probe.UNLIKE)
def test_what_is_drawn_differs_between_ranks_and_jobs(seen: Seen, name: str) -> None:
    runs = (("forked", "script"), ("light", "package"))
    workers = [worker for run in runs for worker in seen.worker(RUNS[run], run[1])]

    drawn = [worker[name] for worker in (*workers, seen.fresh("script"))]

    assert len({str(value) for value in drawn}) == len(drawn) == 5, drawn


def test_the_launchers_variables_are_there(seen: Seen) -> None:
    found = seen.worker(TORCH, "script")[1]["environ"]

    assert found.keys() - without_launchers(found).keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ELAUNCH_LINK"}


def test_a_terminal_is_the_workers_own(tmp_path: Path) -> None:
    folder = _folder(tmp_path.resolve())
    records = []
    for command in ((*COMMAND, *LIGHT, "--nproc-per-node", "1"), (sys.executable, "-u")):
        leader, terminal = pty.openpty()
        env = environment({"OMP_NUM_THREADS": share(1), "TMPDIR": str(tmp_path)})
        try:
            subprocess.run(
                [*command, "train.py"],
                cwd=folder,
                env=env,
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
                timeout=180,
                check=True,
            )
        finally:
            os.close(leader)
            os.close(terminal)
        (path,) = folder.glob("facts*.json")
        records.append(json.loads(path.read_text()))
        path.unlink()

    worker, fresh = records

    assert fresh["standard_streams"]["stdin"]["file"][1] is True
    for name in ("standard_streams", "streams_are_the_originals", "descriptors", "text_encoding"):
        assert worker[name] == fresh[name], name
