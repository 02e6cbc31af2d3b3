"""How much memory the cgroups leave for copies."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elaunch.trainer.memory.capacity import Capacity, cgroup_capacities
from tests.harness import RUN_LIMIT_S

MB = 1_000_000


def cgroup(folder: Path, limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("max", f"{limit}\n"), ("current", f"{used}\n"), ("stat", stat)):
        (folder / f"memory.{name}").write_text(content)


def free(capacities: list[Capacity]) -> list[int]:
    return [capacity.free // MB for capacity in capacities]


def test_each_cgroup_above_this_one_leaves_less_or_more_and_the_page_cache_counts_as_free(tmp_path: Path) -> None:
    job, pod = tmp_path / "pod" / "job", tmp_path / "pod"
    cgroup(job, str(1000 * MB), 500 * MB, f"anon 1\ninactive_file {100 * MB}\nactive_file {50 * MB}\nshmem {90 * MB}\n")
    cgroup(pod, str(2000 * MB), 1900 * MB, "inactive_file 0\nactive_file 0\n")

    capacities = cgroup_capacities("0::/pod/job\n", tmp_path)

    # A twentieth of the limit stays free for the training itself.
    assert free(capacities) == [1000 - 50 - 350, 0]
    assert capacities[0].where == f"the cgroup {job} (memory.max 1,000.0 MB)"


@pytest.mark.parametrize("own", ["0::/\n", "0::/kubepods/of-the-host\n", "0::/../elsewhere\n"])
def test_in_a_container_the_root_is_its_own_cgroup(tmp_path: Path, own: str) -> None:
    cgroup(tmp_path, str(100 * MB), 40 * MB, "inactive_file 0\n")

    assert free(cgroup_capacities(own, tmp_path)) == [55]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """The folder of a memory cgroup that may hold 64 MB."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root, f"elaunch-test-{secrets.token_hex(4)}")
        with suppress(OSError):
            folder.mkdir()
            try:
                if (folder / limit).exists():
                    (folder / limit).write_text(str(64 * MB))
                    yield folder
                    return
            finally:
                folder.rmdir()
    pytest.skip("this user may make no memory cgroup")


ALLOCATING = """
import os, sys
from pathlib import Path

import pytest, torch

from elaunch.trainer.memory.node_memory import NodeMemory, NoRoom
from elaunch.trainer.memory.slots import Slot
from elaunch.trainer.state import Version

folder, cgroup = map(Path, sys.argv[1:])
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
with pytest.raises(OSError, match=rf"the cgroup .*{cgroup.name} \\(.* 6\\d\\.\\d MB\\) leaves \\d+\\.\\d MB"):
    Slot(folder / "large", bytes(16)).grow(200_000_000)
(folder / "large").unlink()
Slot(folder / "small", bytes(16)).grow(20_000_000)
memory = NodeMemory(folder, "m", bytes(16))
with pytest.raises(NoRoom, match=r"\\d MB free and this node's copies .* take 48.0 MB; .*the job more memory"):
    memory.save(Version(0, 1), lambda: {"w": torch.zeros(6_000_000)})
"""


def test_what_a_cgroup_does_not_hold_is_refused_with_its_name_and_no_process_is_killed(small_cgroup: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, "-c", ALLOCATING, folder, str(small_cgroup)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)

    assert ended.returncode == 0, ended.stderr
