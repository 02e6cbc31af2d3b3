"""transformers' Trainer with a small GPT-2 from a configuration."""

from common import STEPS, step
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        step(state.global_step)


model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 64
arguments = TrainingArguments(
    "output",
    use_cpu=True,
    max_steps=STEPS,
    per_device_train_batch_size=4,
    save_steps=10,
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=data, callbacks=[Steps()]).train()
