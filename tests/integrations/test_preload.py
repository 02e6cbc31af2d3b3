"""`--preload` of real libraries: what of them is suitable is imported once, and a worker still knows its rank."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import Job, script, wait_for

pytestmark = pytest.mark.slow
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


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make integrations` installs it")


@pytest.mark.parametrize(("words", "handlers", "propagates"), [((), 1, False), (("logs",), 0, True)])
def test_lightning_is_preloaded_and_each_rank_knows_its_own_number(
    tmp_path: Path, words: tuple[str, ...], handlers: int, propagates: bool
) -> None:
    require("lightning")
    script(tmp_path, LIGHTNING)

    with Job(tmp_path, "--preload", "lightning.pytorch", "--nproc-per-node", "2", "train.py", *words) as job:
        assert job.wait(600) == 0, job.output

    assert job.stdout.count(f"found True True {handlers} {propagates} True") == 2, job.stdout + job.stderr
    assert "preloaded without" not in job.stderr
    assert "fresh interpreter" not in job.stderr
    # lightning sets a variable that torch looks up at each call.
    assert "without effect" not in job.stderr


# Steps without end, each with the CPU time that the program's imports took.
BEGINS = "import time\nbegun_s = time.process_time()\n"
STEPPED = """
import os
took_s = time.process_time() - begun_s
def stepped(*_, **__):
    print("step", os.environ["ELAUNCH_GENERATION"], os.getpid(), took_s, time.monotonic(), flush=True)
    time.sleep(0.05)
"""
NET = "net = torch.nn.Linear(4, 1)\nbatch = torch.ones(2, 4)\noptimizer = torch.optim.SGD(net.parameters(), 1e-3)\n"
PROGRAMS = {
    "lightning": BEGINS + "import lightning.pytorch as pl\nimport torch" + STEPPED + """
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).sum()
    on_train_batch_end = stepped
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(100_000, 4)), batch_size=2)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet).fit(Module(), data)
""",
    "fabric": BEGINS + "import torch\nfrom lightning.fabric import Fabric" + STEPPED + NET + """
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
net, optimizer = fabric.setup(net, optimizer)
while True:
    fabric.backward(net(batch).sum())
    optimizer.step()
    stepped()
""",
    "accelerate": BEGINS + "import torch\nfrom accelerate import Accelerator" + STEPPED + NET + """
accelerator = Accelerator(cpu=True)
net, optimizer = accelerator.prepare(net, optimizer)
while True:
    accelerator.backward(net(batch).sum())
    optimizer.step()
    stepped()
""",
    "transformers": BEGINS + """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
""" + STEPPED + """
class Callback(TrainerCallback):
    on_step_end = stepped
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 100_000
arguments = TrainingArguments("out", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
Trainer(model, arguments, train_dataset=data, callbacks=[Callback()]).train()
""",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The first step of a worker. `imports_s` is the CPU time of its imports."""

    generation: int
    pid: int
    imports_s: float
    at_s: float


def first_steps(job: Job, generation: int) -> list[Step]:
    lines = re.findall(r"step (\d+) (\d+) (\S+) (\S+)\n", job.stdout)
    steps = [Step(int(g), int(pid), float(imports_s), float(at_s)) for g, pid, imports_s, at_s in lines]
    return list({each.pid: each for each in reversed(steps) if each.generation == generation}.values())


def restarted(job: Job, generation: int) -> tuple[float, list[Step]]:
    """Kill a worker of `generation`. Returns the time until all have made a step again, and these steps."""
    killed = first_steps(job, generation)[-1]
    killed_s = time.monotonic()
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: len(first_steps(job, generation + 1)) == 2, "the first steps after a restart", 120)
    steps = first_steps(job, generation + 1)
    return max(each.at_s for each in steps) - killed_s, steps


@pytest.mark.parametrize("library", PROGRAMS)
def test_the_first_start_and_the_first_restart_need_no_imports(tmp_path: Path, library: str) -> None:
    require("lightning" if library == "fabric" else library)
    script(tmp_path, PROGRAMS[library])

    with Job(tmp_path, "--nproc-per-node", "2", "--failure-grace", "0.1", "train.py") as job:
        wait_for(lambda: len(first_steps(job, 0)) == 2, "the first steps", 120)
        took_s, second = restarted(job, 0)

    print(f"{library}: {took_s:.2f} s from the kill to the first step; imports", first_steps(job, 0), second)
    assert "fresh interpreter" not in job.stderr
    for each in (*first_steps(job, 0), *second):
        assert each.imports_s < 0.5
