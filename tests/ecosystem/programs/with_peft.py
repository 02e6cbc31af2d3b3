"""PEFT: LoRA adapters of a small Llama, trained by transformers' Trainer."""

from common import STEPS, step
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        step(state.global_step)


config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 64
arguments = TrainingArguments(
    "output", use_cpu=True, max_steps=STEPS, report_to="none", save_strategy="no", disable_tqdm=True
)
Trainer(model, arguments, train_dataset=data, callbacks=[Steps()]).train()
