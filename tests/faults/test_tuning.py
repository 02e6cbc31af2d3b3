"""`tune(module, warm_up)`: ranks choose alike, no bit of the training changes, the next start remembers.

With `--tune-comm` the trainer is killed in tests/examples/test_ddp_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness import script
from tests.ranks import RankForker, Ranks

# A model of 1.5 MiB, trained in one process group: as it is, tuned, and with the choice remembered.
SCRIPT = """
import hashlib, json, sys, weakref
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer import tune

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(folder=None):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(6)]
    module = nn.Sequential(*layers, nn.Dropout(0.1))
    logged, wrappers = [], weakref.WeakSet()

    def wrap(module, bucket_cap_mb):
        # No two at a time: a wrapper's buckets are as large as all gradients.
        assert not wrappers
        model = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
        wrappers.add(model)
        return model

    torch.manual_seed(rank)
    if folder:
        warm_up = lambda model: model(torch.randn(4, 256)).square().mean().backward()
        model = tune(module, warm_up, wrap=wrap, folder=Path(folder), log=logged.append)
    else:
        model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return {"digest": digest, "logged": logged, "size": model.bucket_bytes_cap}


print(json.dumps([train(), train(sys.argv[1]), train(sys.argv[1])]))
"""


def test_a_script_is_tuned_before_its_first_step_and_trains_the_same_bits(tmp_path: Path, forker: RankForker) -> None:
    program = script(tmp_path, SCRIPT)
    with Ranks(forker, 2, program, str(tmp_path / "tuning")) as ranks:
        one, other = ranks.answers()

    plain, tuned, remembered = one
    assert plain["digest"] == tuned["digest"] == remembered["digest"]
    assert tuned["size"] == remembered["size"]
    assert "communication tuned in" in tuned["logged"][-1]
    assert "as measured before" in remembered["logged"][-1]
    agreed: list[dict[str, Any]] = other
    assert [each["size"] for each in agreed] == [each["size"] for each in one]
    assert [each["logged"] for each in agreed] == [[], [], []]
