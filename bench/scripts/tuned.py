"""One of two workers that train the bundled GPT over a slow link: `tuned.py N`, with torch's variables of a rank.

Tunes the communication twice, without and with lossy hooks. Then DDP's defaults and the two choices take turns, until
each has had N steps. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import CommSettings, tune
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.ranks.peers import Peers
from elaunch.trainer.tuning.rebuild import apply

# Few windows, so that even the fastest link costs something beside them.
WINDOWS, CONTEXT = 2, 64
# Steps in which DDP settles after a change: PowerSGD needs three.
SETTLING, IN_TURN = 3, 5
_PROBE_BYTES = 4_000_000


def link_mbit(peers: Peers) -> float:
    """What an all-reduce moves in a second: each of two ranks sends all of its bytes. The best of three."""
    probe = torch.zeros(_PROBE_BYTES // 4)
    best_s = float("inf")
    for _ in range(4):
        peers.largest([0])
        begun_s = time.perf_counter()
        dist.all_reduce(probe)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 8 * _PROBE_BYTES / best_s / 1e6


def main(count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gpt = GPT(layers=3, heads=8, width=512, context=CONTEXT, dropout=0.0)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), fused=True)
    peers = Peers()
    torch.manual_seed(dist.get_rank())
    windows = torch.randint(0, 256, (WINDOWS, CONTEXT + 1))

    def backward() -> None:
        model(windows[:, :-1], windows[:, 1:]).backward()

    def step_s() -> float:
        """A whole step of the slowest rank."""
        peers.largest([0])
        begun_s = time.perf_counter()
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return peers.largest([round(1e9 * (time.perf_counter() - begun_s))])[0] / 1e9

    said: list[str] = []
    found: dict[str, Any] = {"mbit": link_mbit(peers), "megabytes": sum(p.numel() for p in gpt.parameters()) * 4 / 1e6}
    contenders = {"DDP's defaults": CommSettings()}
    for name, lossy in (("tuned", False), ("tuned, lossy", True)):
        apply(model, CommSettings())
        tuned = tune(model, warm_up=backward, lossy=lossy, say=said.append)
        assert tuned.result is not None, said
        contenders[name] = tuned.settings
        found[name] = {"words": tuned.settings.words, "passes": tuned.result.passes, "spent_s": tuned.result.spent_s}
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    while len(steps["tuned"]) < count:
        for name, settings in contenders.items():
            apply(model, settings, is_trial=True)
            for _ in range(SETTLING):
                step_s()
            steps[name] += [step_s() for _ in range(IN_TURN)]
    peers.close()
    if dist.get_rank() == 0:
        print(json.dumps({**found, "steps": {name: its[:count] for name, its in steps.items()}, "said": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
