"""If workers that are forked after the imports would differ from fresh interpreters, they are fresh ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.processes import library
from tests.harness import LIGHT, finished, script

MODULES = {
    "ranked": "import os\nrank = os.environ.get('LOCAL_RANK', 'none')\n",
    "threaded": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "profile": "",
    "opened": "file = open(__file__)\n",
    "failing": "1 / 0\n",
    "verbose": "raise ValueError(300_000 * 'x')\n",
}
SAYS = "import gc, os, ranked\nprint(gc.get_freeze_count() > 0, ranked.rank == os.environ['LOCAL_RANK'])\n"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ranked", "a preloaded module looks up LOCAL_RANK, which has another value in each worker"),
        ("threaded", "a preloaded module started a thread"),
        ("opened", "a preloaded module keeps .*/opened.py open"),
        ("profile", ".*/mine/profile.py has the name of a module that was preloaded"),
        ("failing", "importing failing failed: ZeroDivisionError: division by zero"),
        ("verbose", "importing verbose failed: ValueError: x{100,2000}"),
    ],
)
def test_one_line_has_the_reason_why_workers_are_fresh_interpreters(tmp_path: Path, name: str, why: str) -> None:
    for module, text in MODULES.items():
        env = library(tmp_path, module, text)
    (tmp_path / "mine").mkdir()
    script(tmp_path / "mine", SAYS)
    (tmp_path / "mine" / "profile.py").write_text("")

    job = finished(tmp_path, "--preload", f"{LIGHT[1]},{name}", "mine/train.py", env=env)

    assert job.stdout == "False True\n", job.output
    logged = re.findall("fresh interpreter, which is slower: (.*)", job.stderr)
    assert len(logged) == 1, job.output
    assert re.fullmatch(why, logged[0])


def test_a_worker_keeps_the_open_file_of_a_library(tmp_path: Path) -> None:
    # As libffi does from 3.5 on, for callbacks; Python 3.14 makes one at `import ctypes`.
    env = library(tmp_path, "mapped", "import _ctypes as library, os\nfd = os.open(library.__file__, os.O_RDONLY)\n")
    same = "os.path.samestat(os.fstat(mapped.fd), os.stat(mapped.library.__file__))"
    script(tmp_path, f"import gc, os, mapped\nprint(gc.get_freeze_count() > 0, {same})\n")

    job = finished(tmp_path, "--preload", f"{LIGHT[1]},mapped", "train.py", env=env)

    assert job.stdout == "True True\n", job.output


TORCH_2_6 = """
import torch.distributed as dist
new = dist.TCPStore
def store(*args, use_libuv=True, **options):
    if use_libuv and "master_listen_fd" in options:
        raise NotImplementedError("The libuv TCPStore backend does not support initialization with an listen fd.")
    return new(*args, use_libuv=use_libuv, **options)
dist.TCPStore = store
"""


def test_a_torch_whose_libuv_takes_no_socket_serves_the_worker_store_without_it(tmp_path: Path) -> None:
    script(tmp_path, "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")

    library(tmp_path, "torch_2_6", TORCH_2_6)
    options = ("--preload", "torch,torch_2_6", "--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    job = finished(tmp_path, *options, env={"PYTHONPATH": str(tmp_path / "lib")})

    assert job.code == 0, job.output
