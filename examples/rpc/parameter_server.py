"""A parameter server: it has the model and the optimizer; trainers send gradients and get parameters.

elaunch --role ps=1,trainer=3 parameter_server.py --steps 200

A step takes the gradients of all trainers, so it is the same whatever order they come in. The server's state is kept
after each step, before a trainer sees it. The trainers have no state: they go on with the step that the server has.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import sys
from dataclasses import dataclass

import torch
from joined import joined, names
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from elaunch.trainer import Keeper

Answer = tuple[int, list[Tensor]] | None


@dataclass
class Request:
    """A trainer's gradients, none before its first step. It waits for the next parameters, or None at the end."""

    trainer: int
    loss: float
    gradients: list[Tensor]
    answer: Future[Answer]


requests: queue.Queue[Request] = queue.Queue()


@rpc.functions.async_execution
def exchange(trainer: int, loss: float, gradients: list[Tensor]) -> Future[Answer]:
    """Runs in the server, in a thread of RPC's. The answer is sent when the step is complete."""
    request = Request(trainer, loss, gradients, Future())
    requests.put(request)
    return request.answer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))


def serve(trainers: int, args: argparse.Namespace) -> None:
    """The server's loop."""
    model = make_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    waiting = [requests.get() for _ in range(trainers)]
    try:
        # A snapshot after each step: nobody else has this state.
        with Keeper(model, optimizer, name="ps", per_rank=(), lose_at_most=0, checkpoints=args.checkpoints) as keeper:
            for step in keeper.steps(args.steps):
                # The state of the step before is kept now, so that no trainer is ever ahead of it.
                answer(waiting, (step - 1, [parameter.detach() for parameter in parameters]))
                waiting = sorted((requests.get() for _ in range(trainers)), key=lambda request: request.trainer)
                with keeper.commit():
                    for parameter, *gradients in zip(parameters, *(each.gradients for each in waiting), strict=True):
                        parameter.grad = torch.stack(gradients).mean(0)
                    optimizer.step()
                if step % 10 == 0:
                    print(f"step {step}: loss {sum(each.loss for each in waiting) / trainers:.4f}", flush=True)
    finally:
        # At the end, and at a stop: then the trainers leave too.
        answer(waiting, None)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters))
    print(f"parameters {digest.hexdigest()[:12]}", flush=True)


def answer(waiting: list[Request], with_what: Answer) -> None:
    while waiting:
        waiting.pop().answer.set_result(with_what)


def train(trainer: int) -> None:
    """A trainer's loop. Its data is a function of the step and its rank."""
    model = make_model()
    found = rpc.rpc_sync("ps0", exchange, args=(trainer, 0.0, []))
    while found is not None:
        step, values = found
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        generator = torch.Generator().manual_seed(1000 * (step + 1) + trainer)
        inputs = torch.randn(64, 32, generator=generator)
        loss = nn.functional.mse_loss(model(inputs)[:, 0], inputs[:, :4].sum(1))
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        found = rpc.rpc_sync("ps0", exchange, args=(trainer, loss.item(), gradients))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", default="checkpoints-ps")
    args = parser.parse_args()
    role = os.environ["ROLE_NAME"]
    if role not in ("ps", "trainer"):
        sys.exit("start it with --role ps=1,trainer=3, or with --role ps on one node and --role trainer on others")
    with joined(follows=role == "trainer"):
        if role == "ps":
            serve(len(names("trainer")), args)
        else:
            train(int(os.environ["ROLE_RANK"]))


if __name__ == "__main__":
    main()
