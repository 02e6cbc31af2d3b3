"""Hydra: the configuration is composed, and arguments change it."""

import hydra
import torch
import torch.distributed as dist
from common import train
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(config.model.width, 4))
    optimizer = hydra.utils.instantiate(config.optimizer, model.parameters())
    train(model, optimizer, lambda: torch.randn(8, config.model.width))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
