"""ignite: an Engine with handlers, its distributed helpers, and a metric."""

import ignite.distributed as idist
import torch
from common import STEPS, step
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage


def train(local_rank: int) -> None:
    model = idist.auto_model(torch.nn.Linear(16, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.randn(256, 16))
    loader = idist.auto_dataloader(data, batch_size=16)

    def update(engine, batch):
        optimizer.zero_grad()
        loss = model(batch[0]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: step(engine.state.iteration))
    trainer.run(loader, max_epochs=STEPS, epoch_length=1)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)
