"""DeepSpeed: an engine with ZeRO stage 1."""

import deepspeed
import torch
from common import STEPS, step

deepspeed.init_distributed("gloo")
net = torch.nn.Linear(16, 4)
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for number in range(1, STEPS + 1):
    loss = engine(torch.randn(8, 16)).square().mean()
    engine.backward(loss)
    engine.step()
    step(number)
