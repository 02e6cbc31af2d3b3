"""DDP and RPC in one model: the embedding is on a parameter server, and the dense part is in all trainers, in DDP.

elaunch --role ps=1,trainer=3 hybrid.py --steps 200

The trainers' Keeper has the dense part. The server keeps its table after each step, before any trainer completes that
step. So after a failure it has the table of the step that the trainers go on from.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from joined import joined
from step_files import StepFiles
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from elaunch.trainer import Keeper

ROWS, COLUMNS, BATCH = 1000, 16, 32
CHECKPOINT_EVERY = 50


class Server:
    """The embedding and its optimizer. It does a thing when all trainers have asked for it, and answers all then."""

    def __init__(self, trainers: int, folder: str) -> None:
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=True)
        self.optimizer = torch.optim.Adagrad(self.table.parameters(), lr=0.1)
        self.ended = threading.Event()
        self._files, self._step = StepFiles("table", folder, CHECKPOINT_EVERY), 0
        self._trainers, self._lock = trainers, threading.Lock()
        self._asked: dict[int, tuple[Any, Future[None]]] = {}

    def ask(self, trainer: int, call: str, argument: int) -> Future[None]:
        """`call` is the name of a method below, which gets the arguments of all trainers."""
        with self._lock:
            self._asked[trainer] = argument, Future()
            future = self._asked[trainer][1]
            if len(self._asked) == self._trainers:
                arguments = [self._asked[each][0] for each in sorted(self._asked)]
                futures = [each for _, each in self._asked.values()]
                self._asked = {}
                _answer(futures, lambda: getattr(self, call)(arguments))
        return future

    def restore(self, steps: list[int]) -> None:
        """Go back to the step that the trainers have."""
        self._step = steps[0]
        if self._step:
            state = self._files.load(self._step)
            self.table.load_state_dict(state["table"])
            self.optimizer.load_state_dict(state["optimizer"])
        print(f"the table is that of step {self._step}", flush=True)

    def update(self, contexts: list[int]) -> None:
        """One step with the mean of the trainers' gradients, always added in the same order; then it is kept."""
        gradients = [autograd.get_gradients(context)[self.table.weight] for context in contexts]
        self.table.weight.grad = sum(gradients[1:], gradients[0]) / len(gradients)
        self.optimizer.step()
        self._step += 1
        self._files.save(self._step, {"table": self.table.state_dict(), "optimizer": self.optimizer.state_dict()})

    def end(self, _: list[int]) -> None:
        """The trainers are done, or stop after this step."""
        self._files.to_disk(self._step)
        digest = hashlib.sha256(self.table.weight.detach().numpy().tobytes()).hexdigest()
        print(f"table {digest[:12]}", flush=True)
        self.ended.set()


def _answer(futures: list[Future[None]], act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        for future in futures:
            future.set_exception(error)
    else:
        for future in futures:
            future.set_result(None)


server: Server


@rpc.functions.async_execution
def ask(trainer: int, call: str, argument: int) -> Future[None]:
    """Runs in the server. It keeps no thread while it waits for the other trainers."""
    return server.ask(trainer, call, argument)


def lookup(rows: Tensor) -> Tensor:
    """Runs in the server. Distributed autograd brings the gradient back to it."""
    return server.table(rows)


def batch(step: int, trainer: int) -> tuple[Tensor, Tensor]:
    """The rows and the targets: a function of the step and the trainer."""
    generator = torch.Generator().manual_seed(1000 * step + trainer)
    rows = torch.randint(0, ROWS, (BATCH, 8), generator=generator)
    return rows, (rows % 7).float().mean(1) - 3


def train(trainer: int, trainers: int, args: argparse.Namespace) -> None:
    """A trainer's loop."""
    # The trainers' own process group: in the job's store, with keys of its own.
    store, _, _ = next(dist.rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=trainer, world_size=trainers)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(COLUMNS, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warm_up = lambda: model(torch.zeros(BATCH, COLUMNS)).sum().backward()  # noqa: E731
    options = {"checkpoints": args.checkpoints, "checkpoint_every": CHECKPOINT_EVERY, "warm_up": warm_up}
    with Keeper(model, optimizer, name="trainers", per_rank=(), **options) as keeper:
        rpc.rpc_sync("ps0", ask, args=(trainer, "restore", keeper.step))
        for step in keeper.steps(args.steps):
            rows, targets = batch(step, trainer)
            with autograd.context() as context:
                vectors = rpc.rpc_sync("ps0", lookup, args=(rows,))
                loss = nn.functional.mse_loss(model(vectors)[:, 0], targets)
                # DDP sums the dense gradients meanwhile; the table's gradient goes to the server.
                autograd.backward(context, [loss])
                gradients = autograd.get_gradients(context)
                for parameter in model.parameters():
                    parameter.grad = gradients[parameter]
                rpc.rpc_sync("ps0", ask, args=(trainer, "update", context))
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
            if trainer == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if trainer == 0:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"parameters {hashlib.sha256(parameters).hexdigest()[:12]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints-hybrid")
    args = parser.parse_args()
    role, number, size = (os.environ[f"ROLE_{name}"] for name in ("NAME", "RANK", "WORLD_SIZE"))
    if role == "ps":
        global server
        # Before it can be asked.
        server = Server(int(os.environ["WORLD_SIZE"]) - int(size), args.checkpoints)
        with joined(follows=True):
            server.ended.wait()
    elif role == "trainer":
        with joined():
            try:
                train(int(number), int(size), args)
            except SystemExit:
                # The Keeper has stopped all trainers after the same step.
                rpc.rpc_sync("ps0", ask, args=(int(number), "end", 0))
                raise
            rpc.rpc_sync("ps0", ask, args=(int(number), "end", 0))
    else:
        sys.exit("start it with --role ps=1,trainer=3, or with --role ps on one node and --role trainer on others")


if __name__ == "__main__":
    main()
