"""The optimizer sees the same gradient at any world size: real gloo workers, resized between steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import pytest

from elaunch.trainer.ledger.ledger import audit_folder
from tests.harness import script
from tests.ranks import RankForker, Ranks

# Each part trains steps after+1…until of a small network on the first `world_size` workers, in a group of their own. It
# leaves in its folder the state, a loss per step and a mask per micro-batch. It prints how far the last four gradients
# are from those of one process on the whole batch.
SCRIPT = """
import copy, json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from elaunch.trainer import Ledger, Order, accumulate

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
# Who frees a group waits for its threads, and these may wait for the interpreter (pytorch #190489).
held = []

def train(asked, number):
    world_size, out, after, until = asked["world_size"], Path(asked["out"]), asked["after"], asked["until"]
    out.mkdir(exist_ok=True)
    dist.init_process_group("gloo", f"file://{out.parent}/group-{number}", rank=rank, world_size=world_size)

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
    net[2].register_forward_hook(lambda _, given, made: masks.append((made == 0).flatten().nonzero()[:, 0].tolist()))

    order = Order(len(data), seed=3, **asked["order"])
    batches = order.batches(rank, world_size, after=after)
    batches = iter(DataLoader(data, batch_sampler=batches, num_workers=asked["num_workers"]))
    ledger = {"rank": rank, "world_size": world_size, "generation": asked["generation"], "after": after}
    ledger = Ledger(out / "ledger", order, **ledger)
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
        logged = {"step": step, "loss": share_loss.item() / world_size, "masks": dict(zip(numbers, masks))}
        lines.write(json.dumps(logged) + chr(10))
    lines.close(), ledger.close()
    if rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, out / "state.pt")
    print("apart", json.dumps({"out": asked["out"], "apart": apart}), flush=True)
    held.append(model)
    dist.destroy_process_group()

for number, asked in enumerate(json.loads(sys.argv[1])):
    if rank < asked["world_size"]:
        train(asked, number)
os._exit(0)
"""


class Curve(TypedDict):
    """The results of a run: losses by step, masks by step and micro-batch, and distances of the last gradients."""

    losses: dict[int, float]
    masks: dict[tuple[int, int], list[int]]
    apart: list[float]


class Plan:
    """A run with several world sizes, one after the other, each up to its step in `ends`."""

    def __init__(
        self, sizes: list[int], ends: list[int], *, dropout: float = 0.0, num_workers: int = 0, **order: Any
    ) -> None:
        self.sizes, self.ends = sizes, ends
        self.name = "-".join(map(str, (*sizes, ends[-1])))
        self.asked = {"out": self.name, "dropout": dropout, "num_workers": num_workers, "order": order}

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The parts of the run, as the ranks' program takes them."""
        steps = zip(self.sizes, [0, *self.ends], self.ends, strict=False)
        return [
            {**self.asked, "generation": generation, "world_size": size, "after": after, "until": until}
            for generation, (size, after, until) in enumerate(steps)
        ]


def train(forker: RankForker, folder: Path, *plans: Plan) -> list[Curve]:
    """Run all plans one after the other, in the same ranks. Returns their results."""
    parts = [{**part, "out": str(folder / plan.name)} for plan in plans for part in plan.parts]
    # No agent is needed for a gradient.
    size = max(part["world_size"] for part in parts)
    with Ranks(forker, size, script(folder, SCRIPT), json.dumps(parts)) as ranks:
        ended = ranks.end()
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    lines = [line for rank in ended for line in rank.out.splitlines()]
    logged = [json.loads(line.removeprefix("apart ")) for line in lines if line.startswith("apart ")]
    return [
        curve(folder, plan, [one["apart"] for one in logged if Path(one["out"]).name == plan.name]) for plan in plans
    ]


def curve(folder: Path, plan: Plan, apart: list[list[float]]) -> Curve:
    found: Curve = {"losses": {}, "masks": {}, "apart": [distance for distances in apart for distance in distances]}
    for path in (folder / plan.name).glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            logged = json.loads(line)
            found["losses"][logged["step"]] = logged["loss"]
            found["masks"] |= {(logged["step"], int(micro)): mask for micro, mask in logged["masks"].items()}
    assert audit_folder(folder / plan.name / "ledger", steps=plan.ends[-1]).ok
    return found


def resized(**order: Any) -> tuple[Plan, Plan]:
    """A run on 4 workers, and one on 4, 3 and 4."""
    calm = Plan([4], [45], dropout=0.2, **order)
    return calm, Plan([4, 3, 4], [14, 30, 45], dropout=0.2, num_workers=1, **order)


def assert_the_same(calm: Curve, resized: Curve) -> None:
    assert sorted(calm["losses"]) == sorted(resized["losses"]) == list(range(1, 46))
    worst = max(abs(resized["losses"][step] - loss) / loss for step, loss in calm["losses"].items())
    print(f"largest relative difference of a loss: {worst:.2g}")
    assert worst < 1e-5
    assert calm["losses"][45] < 0.7 * calm["losses"][1]
    assert resized["masks"] == calm["masks"]
    assert any(mask for mask in calm["masks"].values())


def uneven(world_size: int, batch: int) -> Plan:
    """Step 8 begins in one epoch of 211 samples and ends in the next."""
    return Plan([world_size], [9], global_batch=batch, micro_batch=3)


def assert_close(curve: Curve, world_size: int) -> None:
    """The gradients are those of one process on the whole batch."""
    assert len(curve["apart"]) == 4 * world_size
    assert max(curve["apart"]) < 1e-5


@pytest.fixture(scope="module")
def curves(forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> list[Curve]:
    """Results for 8 and for 10 micro-batches on 3 workers, which both leave a remainder."""
    folder = tmp_path_factory.mktemp("curves")
    return train(forker, folder, *resized(global_batch=24, micro_batch=3), uneven(3, 30))


def test_a_run_resized_from_4_to_3_and_back_has_the_losses_of_one_that_was_not(curves: list[Curve]) -> None:
    assert_the_same(*curves[:2])


def test_the_gradient_is_that_of_one_process_on_the_whole_batch(curves: list[Curve]) -> None:
    assert_close(curves[2], 3)
