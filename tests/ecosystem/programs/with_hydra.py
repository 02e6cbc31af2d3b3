"""Hydra: the configuration is composed, and arguments change it."""

import hydra
import torch
import torch.distributed as dist
from common import STEPS, step
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(config.model.width, 4))
    optimizer = hydra.utils.instantiate(config.optimizer, model.parameters())
    for number in range(1, STEPS + 1):
        model(torch.randn(8, config.model.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
