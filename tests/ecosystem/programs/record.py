"""torch's @record around main, arguments by argparse, a log by logging, and torch's profiler."""

import argparse
import logging

import torch
import torch.distributed as dist
from common import STEPS, step
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profile:
        for number in range(1, STEPS + 1):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profile.step()
            step(number)
    logging.info("the last loss is %.3f", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
