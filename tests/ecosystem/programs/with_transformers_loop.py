"""A model of transformers in one's own loop, under DDP."""

import torch
import torch.distributed as dist
from common import STEPS, step
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

dist.init_process_group("gloo")
config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = torch.nn.parallel.DistributedDataParallel(BertForSequenceClassification(config))
optimizer = torch.optim.AdamW(model.parameters())
schedule = get_linear_schedule_with_warmup(optimizer, 5, STEPS)
for number in range(1, STEPS + 1):
    inputs, labels = torch.randint(0, 64, (4, 8)), torch.randint(0, 2, (4,))
    model(input_ids=inputs, labels=labels).loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    step(number)
dist.destroy_process_group()
