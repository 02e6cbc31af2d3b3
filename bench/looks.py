"""What the ranks' looks cost, and how long a stop takes, with real ranks on this machine: python -m bench.looks.

`cost` trains tiny steps in turns without a Keeper, with one that looks after each step, and with one that measures its
steps. The ranks exchange nothing else: on few cores an all-reduce of gradients takes longer than all that is measured.
`stop` sends SIGTERM to one of two ranks at a random moment. Neither needs an agent. The tables are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # The first step of an optimizer imports it: once here, and not in each rank.
import torch.distributed as dist
from torch import nn

from bench.stats import percentile
from elaunch.trainer.keeper.boundary import Agreed, Boundary, Wants
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.keeper.looks import Looks

RANKS = (2, 8, 16, 32, 64)
# A stretch of training in one way. Two of each way take turns.
STRETCH_S, TURNS = 2.0, 2
WAYS: dict[str, dict[str, Any] | None] = {
    "no Keeper": None,
    "a look after each step": {"each": True},
    "looks as measured": {},
}
STEPS_S = (0.005, 0.1)
_WANTED = Looks.wanted


class Training:
    """Steps of a tiny model on this rank. `pause_s` stands for an accelerator's work; with it gradients are summed."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.model, self._pause_s = nn.Linear(8, 1), pause_s
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def gradients(self) -> None:
        self.model(torch.ones(4, 8)).sum().backward()
        if self._pause_s:
            time.sleep(self._pause_s)
            dist.all_reduce(self.model.weight.grad)

    def change(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def keeper(self, *, each: bool = False, **options: Any) -> Keeper:
        Looks.wanted = (lambda *_: 1) if each else _WANTED  # type: ignore[method-assign]
        return Keeper(self.model, self.optimizer, per_rank=(), say=lambda _: None, **options)

    def train(self, steps: int, options: dict[str, Any] | None, name: str) -> None:
        if options is None:
            for _ in range(steps):
                self.gradients()
                self.change()
            return
        with self.keeper(name=name, **options) as keeper:
            for _ in keeper.steps(steps):
                self.gradients()
                with keeper.commit():
                    self.change()


def forked(count: int, work: Callable[[], object]) -> list[int]:
    """The pids of `count` ranks of one group that do `work` and end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                dist.init_process_group("gloo")
                work()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def measure_cost(folder: Path) -> None:
    """One rank of `cost`. It writes what each way took."""
    looks: list[float] = []
    agreed = Boundary.agreed

    def timed(self: Boundary, wants: Wants) -> Agreed:
        begun_s = time.monotonic()
        found = agreed(self, wants)
        looks.append(time.monotonic() - begun_s)
        return found

    Boundary.agreed = timed  # type: ignore[method-assign]
    training = Training()
    training.train(20, None, "")
    begun_s = time.monotonic()
    training.train(20, None, "")
    steps_in_a_stretch = torch.tensor([max(40, int(STRETCH_S * 20 / (time.monotonic() - begun_s)))])
    dist.broadcast(steps_in_a_stretch, 0)
    steps, found = int(steps_in_a_stretch), []
    for turn in range(TURNS):
        for number, (way, options) in enumerate(WAYS.items()):
            looks.clear()
            dist.barrier()
            cpu_s, begun_s = time.process_time(), time.monotonic()
            training.train(steps, options, f"t{turn}-{number}")
            took = {"wall_s": (time.monotonic() - begun_s) / steps, "cpu_s": (time.process_time() - cpu_s) / steps}
            found.append({"way": way, "steps": steps, "looks": len(looks), "look_s": sorted(looks), **took})
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()


def cost(sizes: Sequence[int]) -> None:
    print("| ranks | | steps | looks | step, ms | CPU per step and rank, ms | a look, median (p95), ms |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            for pid in forked(size, lambda: measure_cost(Path(name))):
                _, status = os.waitpid(pid, 0)
                assert status == 0, status
            ranks = [json.loads((Path(name) / f"rank-{rank}").read_text()) for rank in range(size)]
        for way in WAYS:
            of_rank_0 = [turn for turn in ranks[0] if turn["way"] == way]
            cpu_s = statistics.mean(turn["cpu_s"] for rank in ranks for turn in rank if turn["way"] == way)
            wall_s = statistics.mean(turn["wall_s"] for turn in of_rank_0)
            look_s = [each for turn in of_rank_0 for each in turn["look_s"]]
            look = f"{1000 * statistics.median(look_s):.2f} ({1000 * percentile(look_s, 0.95):.2f})" if look_s else "–"
            steps, looks = (sum(turn[what] for turn in of_rank_0) for what in ("steps", "looks"))
            print(
                f"| {size} | {way} | {steps} | {looks} | {1000 * wall_s:.3f} | {1000 * cpu_s:.3f} | {look} |",
                flush=True,
            )


def measure_stop(folder: Path, step_s: float, options: dict[str, Any], count: int) -> None:
    """One rank of `stop`. It trains until it is stopped, so many times, and writes when and after which step."""
    for number in range(count):
        training = Training(step_s)
        try:
            with training.keeper(name=f"n{number}", **options) as keeper:
                for step in keeper.steps(10**6):
                    if step == 2:
                        (folder / f"trains-{number}-{dist.get_rank()}").touch()
                    training.gradients()
                    with keeper.commit():
                        training.change()
        except SystemExit:
            end = json.dumps([time.monotonic(), keeper.step])
            (folder / f"new-{number}-{dist.get_rank()}").write_text(end)
            (folder / f"new-{number}-{dist.get_rank()}").rename(folder / f"stopped-{number}-{dist.get_rank()}")
    dist.barrier()


def stop(count: int) -> None:
    print("| step, ms | | n | from SIGTERM to the stop of both, ms: median | p95 | longest | after the same step |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    dice = random.Random(5)
    for step_s in STEPS_S:
        for way in list(WAYS)[1:]:
            found = _stops(step_s, WAYS[way] or {}, dice, count)
            took_ms = sorted(1000 * took_s for took_s, _ in found)
            same = sum(is_same for _, is_same in found)
            print(
                f"| {1000 * step_s:.0f} | {way} | {count} | {statistics.median(took_ms):.0f} |"
                f" {percentile(took_ms, 0.95):.0f} | {took_ms[-1]:.0f} | {same} of {count} |",
                flush=True,
            )


def _stops(step_s: float, options: dict[str, Any], dice: random.Random, count: int) -> list[tuple[float, bool]]:
    """For each stop its seconds, and whether both ranks were in the same step."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = forked(2, lambda: measure_stop(folder, step_s, options, count))
        for number in range(count):
            _wait_for_both(folder, f"trains-{number}-*")
            # By then the looks are as far apart as they get.
            time.sleep(1.0 + dice.random())
            begun_s = time.monotonic()
            os.kill(dice.choice(pids), signal.SIGTERM)
            ends = [json.loads(path.read_text()) for path in _wait_for_both(folder, f"stopped-{number}-*")]
            found.append((max(end_s for end_s, _ in ends) - begun_s, len({step for _, step in ends}) == 1))
        for pid in pids:
            os.waitpid(pid, 0)
    return found


def _wait_for_both(folder: Path, pattern: str) -> list[Path]:
    while len(found := list(folder.glob(pattern))) < 2:
        time.sleep(0.005)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "stop"))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--n", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("ELAUNCH_MEMORY", None)
    if given.what == "cost":
        cost([int(size) for size in given.ranks.split(",")])
    else:
        stop(given.n)


if __name__ == "__main__":
    main()
