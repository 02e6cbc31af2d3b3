"""A rank that is killed while it builds a torch extension, or while torch.compile does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import patience
from tests.harness import finished, script

pytestmark = pytest.mark.usefixtures("without_torch")

# As torch.utils.cpp_extension.load does it: who makes the lock builds, and all others wait until it is gone.
# torch's own file is read, without the second of importing torch.
TRAIN = """
import os, pathlib, runpy, signal, sys, time

baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2], 0.01)
if baton.try_acquire():
    if os.environ["ELAUNCH_GENERATION"] == "0":
        # Until the other rank waits.
        while not pathlib.Path("waits").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    pathlib.Path(sys.argv[2]).with_name("built").touch()
    baton.release()
else:
    pathlib.Path("waits").touch()
    baton.wait()
print("loaded", os.environ["ELAUNCH_GENERATION"], flush=True)
"""


def test_the_next_generation_does_not_wait_for_the_lock_of_a_killed_builder(tmp_path: Path) -> None:
    from importlib.util import find_spec

    torch = find_spec("torch")
    assert torch
    assert torch.origin
    folder = tmp_path / "extensions" / "fused_adam"
    folder.mkdir(parents=True)
    script(tmp_path, TRAIN)

    job = patience.finished(
        patience.DISK,
        tmp_path,
        *("--preload-only", "json", "--nproc-per-node", "2", "train.py"),
        str(Path(torch.origin).parent / "utils" / "file_baton.py"),
        str(folder / "lock"),
        env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
    )

    assert job.code == 0, job.stderr
    assert job.stdout.count("loaded 1") == 2, job.stdout
    assert f"removed {folder / 'lock'}: the builder of this torch extension was killed" in job.stderr
    assert (folder / "built").exists()


# As torch.compile does it: a library that is there is loaded, whatever is in it. The linker makes it before it has
# anything to write.
LOAD = """
import ctypes, os, pathlib, signal, sys

library = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "ab", "cabc.so")
if os.environ["ELAUNCH_GENERATION"] == "0":
    library.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if library.exists():
    ctypes.CDLL(str(library))
print("builds anew", flush=True)
"""


def test_the_next_generation_does_not_load_the_empty_library_of_a_killed_compiler(tmp_path: Path) -> None:
    folder = tmp_path / "inductor" / "ab"
    folder.mkdir(parents=True)
    script(tmp_path, LOAD)

    job = patience.finished(
        patience.DISK,
        tmp_path,
        *("--preload-only", "json", "train.py"),
        env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
    )

    assert job.code == 0, job.stderr
    assert job.stdout == "builds anew\n"
    assert f"removed {folder / 'cabc.so'}: a compiler that was killed" in job.stderr


# A stand-in for a disk that hangs: on a real one, the first look at the folder would not return either.
HANGS = """
import pathlib, time

glob = pathlib.Path.glob
pathlib.Path.glob = lambda path, pattern: time.sleep(600) if path.name == "extensions" else glob(path, pattern)
"""


def test_workers_start_where_the_folder_of_extensions_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "extensions").mkdir()
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    script(tmp_path, "print('started')")

    job = finished(
        tmp_path,
        *("--no-preload", "train.py"),
        env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "PYTHONPATH": str(tmp_path)},
    )

    assert job.code == 0, job.stderr
    assert "started" in job.stdout
    assert f"{tmp_path / 'extensions'} could not be looked through within 0.5 s" in job.stderr
