"""`--preload` of real libraries: what of them is suitable is imported once, and a worker still knows its rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.ecosystem.registry import PROGRAMS
from tests.ecosystem.runs import Place, Step, steps_of_all
from tests.harness import Job, require, script

pytestmark = pytest.mark.slow
# The imports of each of these libraries take longer.
IMPORTS_S = 2.0
LIGHTNING = """
import gc, logging, os, sys
early = gc.get_freeze_count() > 0 and "lightning" not in sys.modules
if "logs" in sys.argv:
    logging.basicConfig()
import time
began_s = time.process_time()
import lightning.pytorch, torchmetrics.utilities.prints
took_s = time.process_time() - began_s
from lightning.fabric.utilities.rank_zero import rank_zero_only
rank, log = int(os.environ["RANK"]), logging.getLogger("lightning.pytorch")
ranks = {rank_zero_only.rank, torchmetrics.utilities.prints.rank_zero_only.rank}
print("found", early, ranks == {rank}, len(log.handlers), log.propagate, took_s < 0.2)
"""


@pytest.mark.parametrize(("words", "handlers", "propagates"), [((), 1, False), (("logs",), 0, True)])
def test_lightning_is_preloaded_and_each_rank_knows_its_own_number(
    tmp_path: Path, words: tuple[str, ...], handlers: int, propagates: bool
) -> None:
    require("lightning")
    script(tmp_path, LIGHTNING)

    with Job(tmp_path, "--preload", "lightning.pytorch", "--nproc-per-node", "2", "train.py", *words) as job:
        assert job.wait(600) == 0, job.output

    assert job.stdout.count(f"found True True {handlers} {propagates} True") == 2, job.stdout + job.stderr
    assert "can be preloaded" not in job.stderr
    assert "fresh interpreter" not in job.stderr
    # lightning sets a variable that torch looks up at each call.
    assert "without effect" not in job.stderr


@pytest.mark.parametrize("name", ["with_lightning", "with_fabric", "with_accelerate", "with_transformers"])
def test_the_first_start_and_the_first_restart_need_no_imports(tmp_path: Path, name: str) -> None:
    (program,) = (each for each in PROGRAMS if each.name == name)
    require(program.imports)
    place, killed = Place(tmp_path, program), tmp_path / "killed"

    with place.job("--failure-grace", "0.1", env={"PROGRAM_HELD_UNTIL": str(killed)}) as job:
        first = steps_of_all(job, program)
        before_s = cpu_seconds(first)
        os.kill(first[1].pid, signal.SIGKILL)
        second = steps_of_all(job, program, [step.pid for step in first.values()])
        after_s = cpu_seconds(second)
    place.remove()

    assert "fresh interpreter" not in job.stderr
    assert max(before_s + after_s) < IMPORTS_S, (before_s, after_s)


def cpu_seconds(steps: dict[int, Step]) -> list[float]:
    """What each rank has used."""
    return [sum(psutil.Process(step.pid).cpu_times()[:2]) for step in steps.values()]
