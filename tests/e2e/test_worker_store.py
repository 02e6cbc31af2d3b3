"""The worker store's process serves ranks with no more of torch than it needs, and with all of it where it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, script

TRAIN = """
import os
from datetime import timedelta
from torch.distributed import TCPStore

address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
store.set("word", "heard")
print(store.get("word").decode())
"""
# Notes in a file of the process's name what it imports of torch; may refuse torch's native code without the rest.
CUSTOMISE = """
import sys
from pathlib import Path

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch._C", "torch.nn"):
            process = Path("/proc/self/comm").read_text().strip()
            with Path({folder!r}, process).open("a") as file:
                file.write(name + " ")
        if {refuses} and name == "torch._C" and not hasattr(sys.modules["torch"], "__version__"):
            raise ImportError("this torch comes as a whole")

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("how", "refuses", "imported"),
    [
        (("--no-preload",), False, "torch._C "),
        (("--preload", "json"), True, "torch._C torch._C torch.nn "),
    ],
    ids=["in part", "whole"],
)
def test_the_worker_store_imports_of_torch_what_it_needs(
    tmp_path: Path, how: tuple[str, ...], refuses: bool, imported: str
) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOMISE.format(folder=str(tmp_path), refuses=refuses))
    env = {"PYTHONPATH": str(folder)}

    with Job(tmp_path, *how, "--nproc-per-node", "1", script(tmp_path, TRAIN), env=env) as job:
        assert job.wait() == 0, job.output

    assert job.stdout == "heard\n"
    assert (tmp_path / "elaunch-store").read_text() == imported
