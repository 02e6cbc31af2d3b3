"""TRL: supervised fine-tuning of a small model with tokens of one's own."""

from common import STEPS, step
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Steps(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        step(state.global_step)


words = {word: number for number, word in enumerate(["<end>", "one", "two", "three", "four"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokens = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), n_positions=32, n_embd=16, n_layer=1, n_head=2))
data = Dataset.from_dict({"text": ["one two three four"] * 64})
arguments = SFTConfig(
    "output", use_cpu=True, bf16=False, max_steps=STEPS, report_to="none", save_strategy="no", disable_tqdm=True
)
SFTTrainer(model, arguments, train_dataset=data, processing_class=tokens, callbacks=[Steps()]).train()
