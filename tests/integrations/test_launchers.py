"""Libraries that know torchrun find the same under elaunch, and functions by value with the real cloudpickle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY, RUN_LIMIT_S, Job, environment, require, script

pytestmark = pytest.mark.slow

LIGHTNING = """
import os, sys
from elaunch import LaunchConfig, launch

def found():
    from lightning.pytorch import Trainer
    trainer = Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, barebones=True)
    own = trainer._accelerator_connector.cluster_environment
    return type(own).__name__, own.global_rank(), own.local_rank(), own.world_size(), own.creates_processes_externally

if __name__ == "__main__":
    values = {os.environ["RANK"]: found()} if "RANK" in os.environ else launch(LaunchConfig(1, 1, 2), found)()
    for rank, value in values.items():
        print("found", rank, *value, flush=True)
"""
# The lines of docs/functions.md, and a notebook's own.
NOTEBOOK = """
import elaunch
import torch.distributed.launcher.api as api

api.LaunchConfig, api.elastic_launch = elaunch.LaunchConfig, elaunch.elastic_launch

from accelerate import notebook_launcher

def train(start):
    import os
    from accelerate import Accelerator
    import torch
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(start + accelerator.process_index), "sum")
    print("found", total.item(), "ELAUNCH_GENERATION" in os.environ, flush=True)

notebook_launcher(train, (3,), num_processes=2)
"""
BY_VALUE = """
import os
from elaunch import LaunchConfig, launch

class Answer:
    def __init__(self, text): self.text = text

word = "a closure's"

def made(scale):
    def train(start):
        return Answer(f"{word} {scale * (start + int(os.environ['RANK']))}")
    return train

values = launch(LaunchConfig(1, 1, 2, max_restarts=0), made(10))(1)
print("found", *[(type(value) is Answer, value.text) for _, value in sorted(values.items())])
"""
ACCELERATE = """
from accelerate import Accelerator
found = Accelerator()
print("found", found.mixed_precision, found.num_processes, flush=True)
"""
CONFIGURATION = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""


def printed(folder: Path, text: str) -> str:
    """What a program on stdin prints: it has no file, as a notebook."""
    done = subprocess.run(
        [sys.executable, "-"], cwd=folder, env=environment(), input=text, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lightning_needs_no_cluster_environment(tmp_path: Path) -> None:
    require("lightning")
    program = script(tmp_path, LIGHTNING)
    expected = [f"found {rank} TorchElasticEnvironment {rank} {rank} 2 True" for rank in range(2)]

    with Job(tmp_path, "--nproc-per-node", "2", str(program)) as job:
        assert job.wait(300) == 0, job.output
    called = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment(), timeout=RUN_LIMIT_S
    )

    assert sorted(line[4:] for line in job.stdout.splitlines() if "found" in line) == expected, job.output
    assert sorted(line for line in called.stdout.splitlines() if line.startswith("found")) == expected, called.stderr


def test_accelerates_notebook_launcher_runs_on_elaunch_with_the_lines_of_the_page(tmp_path: Path) -> None:
    require("accelerate")
    require("cloudpickle")
    lines = NOTEBOOK.split("\n\nfrom accelerate")[0].strip()
    assert lines in (REPOSITORY / "docs" / "functions.md").read_text()

    assert printed(tmp_path, NOTEBOOK).count("found 7 True") == 2


def test_accelerates_configuration_reaches_the_workers_as_documented(tmp_path: Path) -> None:
    require("accelerate")
    page = (REPOSITORY / "docs" / "functions.md").read_text()
    printing, _, launching = page.partition("```sh\naccelerate")[2].partition("```")[0].partition("\n")
    script(tmp_path, CONFIGURATION, "accelerate.yaml")
    script(tmp_path, ACCELERATE)
    commands = f"accelerate{printing}\n{launching.replace('-node 8', '-node 2')}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**environment(), "PATH": path, "TMPDIR": str(tmp_path)}

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("found bf16 2") == 2, done.stdout + done.stderr


def test_a_closure_and_a_class_of_a_notebook_are_sent_by_value(tmp_path: Path) -> None:
    require("cloudpickle")

    assert printed(tmp_path, BY_VALUE) == """found (True, "a closure's 10") (True, "a closure's 20")\n"""
