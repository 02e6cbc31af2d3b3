"""What docs/fidelity.md says that differs is measured, so that a row that is no longer true is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fidelity.ways import FORKED, look, looks
from tests.harness import script

LOOK = """
import sys
import atexit, gc, json, os, time

found = {
    "finders": any("site-packages/torch" in path for path in sys.path_importer_cache),
    "exit functions": atexit._ncallbacks(),
    "frozen objects": gc.get_freeze_count(),
    "memory": [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")],
    "CPU time": time.process_time(),
    "hash": hash("a text"),
    "address": id(sys.modules),
    "first environment": "RANK=" in open("/proc/self/environ").read(),
    "rank": "RANK" in os.environ,
    "link": os.environ.get("ELAUNCH_LINK"),
}
start_s = time.perf_counter()
import torch, torch.distributed, torch._dynamo
found["import took"] = time.perf_counter() - start_s
found["cache folder"] = "TORCHINDUCTOR_CACHE_DIR" in os.environ
with open(f"facts{os.environ.get('RANK', '')}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What two forked workers found, and a fresh interpreter."""
    folder: Path = tmp_path_factory.mktemp("differences")
    script(folder, LOOK)
    return looks(folder, FORKED, "train.py"), look(folder, "train.py")


@pytest.mark.parametrize("name", ["hash", "address"])
def test_all_workers_share(seen: tuple[list[dict[str, Any]], dict[str, Any]], name: str) -> None:
    workers, fresh = seen

    assert workers[0][name] == workers[1][name] != fresh[name]


def test_a_worker_has_looked_into_torchs_folders(seen: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    workers, fresh = seen

    assert [worker["finders"] for worker in (*workers, fresh)] == [True, True, False]


@pytest.mark.parametrize("name", ["exit functions", "frozen objects", "memory"])
def test_a_worker_has_more(seen: tuple[list[dict[str, Any]], dict[str, Any]], name: str) -> None:
    workers, fresh = seen

    assert min(worker[name] for worker in workers) > fresh[name]


def test_the_import_is_over_before_it_begins(seen: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    workers, fresh = seen

    assert max(worker["import took"] for worker in workers) < 0.1 * fresh["import took"]
    assert not any(worker["cache folder"] for worker in workers)
    assert fresh["cache folder"]


def test_the_cpu_time_of_the_import_is_not_the_workers(seen: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    workers, _ = seen

    assert max(worker["CPU time"] for worker in workers) < 0.5


def test_the_rank_is_in_the_environment_but_not_in_the_one_that_ps_shows(
    seen: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    workers, _ = seen

    assert all(worker["rank"] and worker["link"] and not worker["first environment"] for worker in workers)
