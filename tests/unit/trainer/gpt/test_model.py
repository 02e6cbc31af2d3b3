"""The model, and which of its parameters decay."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.train import decay_groups
from tests.harness import RUN_LIMIT_S


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, heads=2, width=16, context=8, dropout=0.0)


def test_a_position_sees_no_later_byte() -> None:
    gpt = tiny()
    bytes_BT = torch.randint(0, 256, (1, 8))
    changed_BT = bytes_BT.clone()
    changed_BT[0, 5] = (changed_BT[0, 5] + 1) % 256

    difference_T = (gpt._features(bytes_BT) - gpt._features(changed_BT)).abs().amax(-1)[0]

    assert difference_T[:5].max() == 0
    assert difference_T[5:].min() > 0


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    gpt = GPT(layers=1, heads=2, width=8, context=4, dropout=0.0)
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}

    decayed, others = decay_groups(gpt)

    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    of_decayed, of_others = ([names[id(each)] for each in group["params"]] for group in (decayed, others))
    assert sorted([*of_decayed, *of_others]) == sorted(names.values())
    assert "embed_byte.weight" in of_decayed
    assert "blocks.0.expand.weight" in of_decayed
    assert "norm.weight" in of_others
    assert all("bias" in name or "norm" in name for name in of_others)


COUNT = """
import functools, sys
import torch, torch._dynamo.utils as utils, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elaunch.trainer.gpt.model import GPT

# Graphs as they are, without the compiler's minutes.
torch.compile = functools.partial(torch.compile, backend="aot_eager")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gpt = GPT(layers=2, heads=2, width=16, context=8, dropout=0.0)
bytes_BT = torch.randint(0, 256, (2, 9))
eager = gpt(bytes_BT[:, :-1], bytes_BT[:, 1:])
gpt.compile_in(parts=sys.argv[1] == "parts")
# Buckets that end within a block.
model = DistributedDataParallel(gpt, bucket_cap_mb=0.001)
loss = model(bytes_BT[:, :-1], bytes_BT[:, 1:])
loss.backward()
torch.testing.assert_close(loss, eager)
print("graphs", utils.counters["aot_autograd"]["ok"])
del model
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "graphs"), [("parts", 2), ("whole", 1)])
def test_a_compiled_network_is_one_graph_or_a_graph_for_all_blocks_and_one_for_the_loss(how: str, graphs: int) -> None:
    """DDP's buckets cut no graph."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S
    )

    assert done.stdout == f"graphs {graphs}\n", done.stdout + done.stderr
