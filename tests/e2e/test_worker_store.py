"""The worker store's process imports only torch's native code; where that fails, it imports the whole of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, script

# The program's own client is torch's too, without the two seconds of importing the rest.
TRAIN = """
import os
from datetime import timedelta
from elaunch.agent.forkserver.tcp_store import tcp_store

TCPStore = tcp_store()
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=150))
store.set("word", "heard")
print(store.get("word").decode())
"""
# Notes in a file what the store's process imports of torch; may refuse torch's native code without the rest.
CUSTOMISE = """
import os, sys
from pathlib import Path

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in ("torch._C", "torch.nn") or Path("/proc/self/comm").read_text() != "elaunch-store\\n":
            return
        with Path({folder!r}, "imported").open("a") as file:
            file.write(name + " ")
        if name == "torch._C" and not hasattr(sys.modules["torch"], "__version__"):
            {trouble}

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("how", "trouble", "imported", "generations"),
    [
        (("--no-preload",), "pass", "torch._C ", 1),
        (("--preload-only", "json"), "raise ImportError('it comes as a whole')", "torch._C torch._C torch.nn ", 1),
        (("--no-preload",), "os.abort()", "torch._C torch._C torch.nn ", 2),
    ],
    ids=["in part", "refused", "crashed"],
)
def test_the_worker_store_imports_of_torch_what_it_needs(
    tmp_path: Path, how: tuple[str, ...], trouble: str, imported: str, generations: int
) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOMISE.format(folder=str(tmp_path), trouble=trouble))
    env = {"PYTHONPATH": str(folder)}

    with Job(tmp_path, *how, "--nproc-per-node", "1", script(tmp_path, TRAIN), env=env) as job:
        assert job.wait() == 0, job.output

    assert job.stdout == "heard\n"
    assert job.output.count("elaunch: generation") == generations, job.output
    assert (tmp_path / "imported").read_text() == imported
