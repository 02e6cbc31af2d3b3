"""The optimizer sees the same gradient at any world size: real gloo workers, resized between steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import pytest

from elaunch.trainer.ledger.ledger import audit_folder
from tests.harness import finished, records, script, slow

# Trains steps after+1…until of a small network, and leaves in the folder: the state, a loss per step, a mask per
# micro-batch, and how far the last four gradients are from those of one process on the whole batch.
SCRIPT = """
import copy, json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from elaunch.trainer import Ledger, Order, accumulate

asked = json.loads(sys.argv[1])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
out, after, until = Path(asked["out"]), asked["after"], asked["until"]
out.mkdir(exist_ok=True)
torch.set_num_threads(1)
dist.init_process_group("gloo")

torch.manual_seed(0)
inputs = torch.randn(211, 6)
data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt() + 0.1 * torch.randn(211, 1))
net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(asked["dropout"]), nn.Linear(24, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
if after:
    kept = torch.load(out / "state.pt", weights_only=True)
    net.load_state_dict(kept["model"]), optimizer.load_state_dict(kept["optimizer"])
masks, apart = [], []
net[2].register_forward_hook(lambda module, given, made: masks.append((made == 0).flatten().nonzero()[:, 0].tolist()))

order = Order(len(data), seed=3, **asked["order"])
loader = DataLoader(data, batch_sampler=order.batches(rank, world_size, after=after), num_workers=asked["num_workers"])
batches = iter(loader)
ledger = Ledger(out / "ledger", order, rank=rank, world_size=world_size, generation=asked["generation"], after=after)
lines = (out / f"rank-{rank}.jsonl").open("a")
for step in range(after + 1, until + 1):
    masks.clear()
    share_loss = torch.zeros((), dtype=torch.float64)
    for micro in accumulate(model, order, step):
        x, y = next(batches)
        loss = mse_loss(model(x), y) * micro.weight
        loss.backward()
        share_loss += loss.detach()
        ledger.record(step, micro)
    if step > until - 4:
        alone = copy.deepcopy(net)
        alone.zero_grad()
        x, y = data[[sample for micro in order.microbatches(step) for sample in micro]]
        mse_loss(alone.eval()(x), y).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(net.parameters(), alone.parameters(), strict=True)]
        apart.append(max(((a - b).norm() / b.norm()).item() for a, b in pairs))
    optimizer.step(), optimizer.zero_grad()
    ledger.commit(step)
    dist.all_reduce(share_loss)
    numbers = [micro for micro in order.share(rank, world_size)]
    said = {"step": step, "loss": share_loss.item() / world_size, "masks": dict(zip(numbers, masks))}
    lines.write(json.dumps(said) + chr(10))
lines.close(), ledger.close()
if rank == 0:
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, out / "state.pt")
print("apart", json.dumps({"rank": rank, "apart": apart}))
dist.destroy_process_group()
"""


class Curve(TypedDict):
    """What a run left: losses by step, masks by step and micro-batch, and the last gradients' distances."""

    losses: dict[int, float]
    masks: dict[tuple[int, int], list[int]]
    apart: list[float]


def train(
    folder: Path, sizes: list[int], ends: list[int], *, dropout: float = 0.0, num_workers: int = 0, **order: Any
) -> Curve:
    """Train with each of these world sizes up to that step, one job after the other."""
    out = "-".join(map(str, sizes))
    found: Curve = {"losses": {}, "masks": {}, "apart": []}
    program = str(script(folder, SCRIPT))
    for generation, (world_size, until) in enumerate(zip(sizes, ends, strict=True)):
        after = ends[generation - 1] if generation else 0
        asked = {"out": out, "after": after, "until": until, "generation": generation, "order": order}
        asked |= {"dropout": dropout, "num_workers": num_workers}
        job = finished(folder, "--max-restarts", "0", "--nproc-per-node", str(world_size), program, json.dumps(asked))
        assert job.code == 0, job.output
        found["apart"] += [distance for said in records(job, "apart") for distance in said["apart"]]
    for path in (folder / out).glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            found["losses"][said["step"]] = said["loss"]
            found["masks"] |= {(said["step"], int(micro)): mask for micro, mask in said["masks"].items()}
    assert audit_folder(folder / out / "ledger", steps=ends[-1]).ok
    return found


# 8 micro-batches among 3 workers, and 10 among 4 or 3, leave remainders.
@pytest.mark.parametrize(
    "order", [{"global_batch": 24, "micro_batch": 3}, slow({"global_batch": 30, "micro_batch": 3, "tail": "short"})]
)
def test_a_run_resized_from_4_to_3_and_back_has_the_losses_of_one_that_was_not(
    tmp_path: Path, order: dict[str, Any]
) -> None:
    calm = train(tmp_path, [4], [90], dropout=0.2, **order)
    resized = train(tmp_path, [4, 3, 4], [29, 61, 90], dropout=0.2, num_workers=2, **order)

    assert sorted(calm["losses"]) == sorted(resized["losses"]) == list(range(1, 91))
    worst = max(abs(resized["losses"][step] - loss) / loss for step, loss in calm["losses"].items())
    print(f"largest relative difference of a loss: {worst:.2g}")
    assert worst < 1e-5
    assert calm["losses"][90] < 0.5 * calm["losses"][1]
    assert resized["masks"] == calm["masks"]
    assert any(mask for mask in calm["masks"].values())


# Step 8 ends an epoch of 211 samples: of a global batch of 30 one sample is left for it, of 27 there are 22.
@pytest.mark.parametrize(("world_size", "batch"), [slow(1, 30), slow(2, 30), (3, 30), slow(4, 30), slow(4, 27)])
def test_the_gradient_is_that_of_one_process_on_the_whole_batch(tmp_path: Path, world_size: int, batch: int) -> None:
    curve = train(tmp_path, [world_size], [9], global_batch=batch, micro_batch=3, tail="short")

    assert len(curve["apart"]) == 4 * world_size
    assert max(curve["apart"]) < 1e-5


SHARDED = """
import copy, json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from elaunch.trainer import Order, accumulate

even = sys.argv[1] == "even"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
x, y = torch.randn(50, 6), torch.randn(50, 1)
net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
alone = copy.deepcopy(net)
fully_shard(net, mesh=dist.init_device_mesh("cpu", (world_size,)))
order = Order(50, seed=3, global_batch=24, micro_batch=3, tail="short", even=even)
for step in (1, 3):
    for model in (net, alone):
        model.zero_grad()
    batches = iter(order.batches(rank, world_size, after=step - 1))
    for micro in accumulate(net, order, step):
        ids = next(batches)
        (mse_loss(net(x[ids]), y[ids]) * micro.weight).backward()
    ids = [sample for micro in order.microbatches(step) for sample in micro]
    mse_loss(alone(x[ids]), y[ids]).backward()
    pairs = [(a.grad.full_tensor(), b.grad) for a, b in zip(net.parameters(), alone.parameters(), strict=True)]
    print("apart", json.dumps({"step": step, "apart": max(((a - b).norm() / b.norm()).item() for a, b in pairs)}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_sharded_models_get_the_same_gradient_with_even_ranks(tmp_path: Path, world_size: int) -> None:
    program = str(script(tmp_path, SHARDED))

    job = finished(tmp_path, "--max-restarts", "0", "--nproc-per-node", str(world_size), program, "even")

    assert job.code == 0, job.output
    said = records(job, "apart")
    assert [one["step"] for one in said].count(3) == world_size
    assert max(one["apart"] for one in said) < 1e-5


def test_sharded_models_on_uneven_ranks_are_refused_and_do_not_hang(tmp_path: Path) -> None:
    program = str(script(tmp_path, SHARDED))

    job = finished(tmp_path, "--max-restarts", "0", "--nproc-per-node", "3", program, "uneven")

    assert job.code == 1
    assert "3 workers cannot share 8 micro-batches evenly" in job.output
