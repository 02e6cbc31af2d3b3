"""A variable that a script sets before its own `import torch` takes effect, or one line says that it does not.

There is one job for each environment of the shell. Every rank runs a different program, which is compared with the same
program in a fresh interpreter.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.habits import TORCH, Run, fresh, worker
from tests.harness import script, slow

PROGRAMS = """
import json, os, sys
def as_asked(**variables): os.environ.update(variables)
def found(what): os.write(1, b"found " + json.dumps(what).encode() + b"\\n")
def only_after_a_restart():
    if os.environ.get("ELAUNCH_GENERATION") == "0": sys.exit()
"""
LOOK = """
import ctypes, logging
import torch
import torch.distributed as dist
import numpy
if with_config:
    import torch._dynamo.config, torch._inductor.config

def stacktrace():
    try:
        torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        return len(str(error)) > 1000

blas = next(line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line)
found({
    "OMP_NUM_THREADS": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "MKL_NUM_THREADS": [line.strip() for line in torch.__config__.parallel_info().splitlines() if "threads" in line],
    "OPENBLAS_NUM_THREADS": ctypes.CDLL(blas).scipy_openblas_get_num_threads64_(),
    "TORCH_DISTRIBUTED_DEBUG": dist.get_debug_level().name,
    "TORCH_LOGS": [logging.getLogger(n).getEffectiveLevel() for n in ("torch._dynamo", "torch._inductor")],
    "TORCHDYNAMO_SUPPRESS_ERRORS": with_config and torch._dynamo.config.suppress_errors,
    "TORCHINDUCTOR_MAX_AUTOTUNE": with_config and torch._inductor.config.max_autotune,
    "PYTORCH_JIT": torch.jit._state._enabled.enabled,
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "TORCH_SHOW_CPP_STACKTRACES": stacktrace(),
    "asked": globals().get("asked"),
})
"""

# Libraries ask whether torch is there, or was imported, before they import it.
ASKS = """
import importlib.util
asked = ["torch" in sys.modules, "numpy" in sys.modules, importlib.util.find_spec("torch").origin]
torch = __import__("torch.nn.functional")
asked += [torch is sys.modules["torch"], torch.nn.functional.relu.__module__, torch.__spec__.name, torch.__file__]
import importlib
asked.append(importlib.import_module("torch.nn") is torch.nn)
from torch import *
from torch import nn, optim as o
asked += [o is torch.optim, torch.__loader__ is torch.__spec__.loader, __import__("torch") is torch]
import inspect
asked += [inspect.getsourcefile(nn.Linear), "torch" in globals()]
"""

SETS = {
    # Each program sets several variables with separate effects: one import of torch shows all of them.
    "all of them": "as_asked(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1',"
    " TORCH_DISTRIBUTED_DEBUG='DETAIL', TORCH_LOGS='+dynamo', TORCHDYNAMO_SUPPRESS_ERRORS='1',"
    " TORCHINDUCTOR_MAX_AUTOTUNE='1', PYTORCH_JIT='0', CUDA_VISIBLE_DEVICES='7', TORCH_CPP_LOG_LEVEL='ERROR',"
    " TORCH_SHOW_CPP_STACKTRACES='1')",
    "MKL alone, by torch.nn": "as_asked(MKL_NUM_THREADS='1')\n" + ASKS,
}
# In the first generation only the last rank runs its program, and ends the generation.
UNSETS = {
    "gone again": "only_after_a_restart()\n"
    "for name in 'TORCH_DISTRIBUTED_DEBUG', 'TORCH_LOGS', 'TORCHDYNAMO_SUPPRESS_ERRORS', 'PYTORCH_JIT':\n"
    "    del os.environ[name]\nas_asked(OMP_NUM_THREADS='2')",
    "started again": "os.environ['OMP_NUM_THREADS'] = '2'; os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'\n"
    "import torch, torch.distributed as dist\n"
    "found([os.environ['ELAUNCH_GENERATION'], torch.get_num_threads(), dist.get_debug_level().name])\n"
    "if os.environ['ELAUNCH_GENERATION'] == '0': os.kill(os.getpid(), 9)\n"
    "sys.exit()",
}
SHELL = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_LOGS": "+dynamo",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "1",
    "PYTORCH_JIT": "0",
}


def launched(
    folder: Path, programs: Mapping[str, str], env: Mapping[str, str], max_restarts: int = 0
) -> tuple[Run, dict[str, Any]]:
    """Run all programs, one in each rank. Returns the run, and the final facts of each program."""
    branches = "".join(
        f"{'el' if rank else ''}if os.environ['RANK'] == '{rank}':\n"
        + "".join(f"    {line}\n" for line in (text or "pass").splitlines())
        for rank, text in enumerate(programs.values())
    )
    # Import these two modules only where needed: they take a fresh interpreter a second.
    looks = [str(rank) for rank, text in enumerate(programs.values()) if "TORCHDYNAMO" in text]
    config = f"with_config = os.environ['RANK'] in {looks} and 'ALONE' not in os.environ\n"
    script(folder, PROGRAMS + config + branches + LOOK)
    run = worker(
        folder,
        "train.py",
        how=(*TORCH, "--nproc-per-node", str(len(programs)), "--max-restarts", str(max_restarts)),
        env=env,
    )
    assert run.code == 0, str(run)
    assert not any("fresh interpreter" in line for line in run.logged), str(run)
    lines = re.findall(r"^\[(\d+)\] found (.*)$", run.out.decode(), re.MULTILINE)
    names = list(programs)
    return run, {names[int(rank)]: json.loads(text) for rank, text in lines}


def alone(folder: Path, rank: int, env: Mapping[str, str]) -> Any:
    """The facts that the program of `rank` finds in a fresh interpreter, without the compiler's settings."""
    return _alone(folder, rank, tuple(env.items()))


@functools.cache
def _alone(folder: Path, rank: int, env: tuple[tuple[str, str], ...]) -> Any:
    run = fresh(folder, "train.py", env={**dict(env), "RANK": str(rank), "ALONE": "1"})
    assert run.code == 0, str(run)
    return json.loads(run.out.decode().split("found ")[1])


def with_compiler(found: dict[str, Any], setting: bool) -> dict[str, Any]:
    """`found` with the compiler's settings of a fresh interpreter, where importing the compiler takes two seconds."""
    return {**found, "TORCHDYNAMO_SUPPRESS_ERRORS": setting, "TORCHINDUCTOR_MAX_AUTOTUNE": setting}


def warned(run: Run, rank: int) -> str:
    """The lines about a variable that came too late, of one rank or of the whole job."""
    lines = [*run.logged, *run.err.decode(errors="replace").splitlines()]
    mine = [line for line in lines if not re.match(rf"\[(?!{rank}\])\d+\]|elaunch: .*\brank (?!{rank}\b)\d", line)]
    return "\n".join(line for line in mine if "elaunch" in line and "--no-preload" in line)


def assert_effect_or_word(mine: dict[str, Any], theirs: dict[str, Any], logged: str) -> None:
    wrong = [name for name in theirs if mine[name] != theirs[name] and name not in logged]
    assert not wrong, {name: (mine[name], theirs[name]) for name in wrong}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sets")
    return (folder, *launched(folder, SETS, {}))


@pytest.mark.parametrize("name", ["all of them", slow("MKL alone, by torch.nn")])
def test_what_a_script_sets_before_import_torch_has_its_effect_or_a_warning(
    job: tuple[Path, Run, dict[str, Any]], name: str
) -> None:
    folder, run, found = job
    rank = list(SETS).index(name)

    expected = alone(folder, rank, {})
    if name == "all of them":
        expected = with_compiler(expected, True)

    assert_effect_or_word(found[name], expected, warned(run, rank))


@pytest.fixture(scope="module")
def shell_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unsets")
    return (folder, *launched(folder, UNSETS, SHELL, max_restarts=1))


@pytest.mark.slow
def test_what_a_script_removes_before_import_torch_is_gone_or_has_a_warning(
    shell_job: tuple[Path, Run, dict[str, Any]],
) -> None:
    folder, run, found = shell_job

    assert_effect_or_word(found["gone again"], with_compiler(alone(folder, 0, SHELL), False), warned(run, 0))
