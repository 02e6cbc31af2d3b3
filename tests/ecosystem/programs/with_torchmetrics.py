"""torchmetrics: a metric that is computed over all ranks."""

import torch
import torch.distributed as dist
from common import STEPS, step
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
accuracy = MulticlassAccuracy(num_classes=4)
for number in range(1, STEPS + 1):
    inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
    outputs = model(inputs)
    torch.nn.functional.cross_entropy(outputs, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy.update(outputs, targets)
    if number % 5 == 0:
        accuracy.compute()
        accuracy.reset()
    step(number)
dist.destroy_process_group()
