"""`--preload` of real libraries: what of them is suitable is imported once, and a worker still knows its rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness import Job, script

pytestmark = pytest.mark.slow
LIGHTNING = """
import sys
early = "fsspec" in sys.modules
import lightning, os
from lightning.fabric.utilities.rank_zero import rank_zero_only
print("found", early, rank_zero_only.rank == int(os.environ["RANK"]))
"""
TRANSFORMERS = """
import gc, os
import transformers.trainer
alone = len(os.listdir("/proc/self/task")) == 1
print("found", gc.get_freeze_count() > 0, alone and "JE_ARROW_MALLOC_CONF" not in os.environ)
"""


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make integrations` installs it")


def test_lightning_is_left_out_and_what_it_needs_is_not(tmp_path: Path) -> None:
    require("lightning")
    script(tmp_path, LIGHTNING)

    with Job(tmp_path, "--preload", "lightning", "--nproc-per-node", "2", "train.py") as job:
        assert job.wait(600) == 0, job.output

    assert job.stdout.count("found True True") == 2, job.stdout + job.stderr
    assert job.stderr.count("lightning.fabric.utilities.rank_zero looks up LOCAL_RANK") == 1
    assert "fresh interpreter" not in job.stderr
    # lightning sets a variable that torch looks up at each call.
    assert "without effect" not in job.stderr


def test_transformers_trainer_is_preloaded_as_a_whole(tmp_path: Path) -> None:
    require("transformers")
    script(tmp_path, TRANSFORMERS)

    with Job(tmp_path, "--preload", "transformers.trainer", "--nproc-per-node", "2", "train.py") as job:
        assert job.wait(600) == 0, job.output

    assert job.stdout.count("found True True") == 2, job.stdout + job.stderr
    assert "preloaded" not in job.stderr
