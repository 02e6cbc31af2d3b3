"""The pure parts of the training loop: what decays, the held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elaunch.trainer.gpt.config import TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.gpt.model import GPT
from elaunch.trainer.parallel.plan import DataShare
from elaunch.trainer.train import Windows, decay_groups

CPU = torch.device("cpu")


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    gpt = GPT(layers=1, heads=2, width=8, context=4, dropout=0.0)
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}

    decayed, others = decay_groups(gpt)

    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    of_decayed, of_others = ([names[id(each)] for each in group["params"]] for group in (decayed, others))
    assert sorted([*of_decayed, *of_others]) == sorted(names.values())
    assert "embed_byte.weight" in of_decayed
    assert "blocks.0.expand.weight" in of_decayed
    assert "norm.weight" in of_others
    assert all("bias" in name or "norm" in name for name in of_others)


@pytest.mark.parametrize("windows_held_out", [1, 7, 500])
def test_the_held_out_text_is_the_same_for_any_number_of_ranks_and_each_rank_computes_as_often(
    tmp_path: Path, windows_held_out: int
) -> None:
    # A twentieth is held out, in windows of 9 bytes.
    (tmp_path / "text").write_bytes(bytes(i * i % 251 for i in range(20 * 9 * windows_held_out + 19)))
    config = TrainConfig(data=tmp_path / "text", context=8, micro_batch=2)
    corpus = Corpus.open(config)

    def held_out(world_size: int) -> dict[bytes, float]:
        ranks = [
            list(Windows(config, corpus, DataShare(r, world_size, leads=True), CPU).held_out())
            for r in range(world_size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        assert all(inputs.shape[1] == 8 for batches in ranks for inputs, _, _ in batches)
        return {bytes(inputs.flatten().tolist()): weight for b in ranks for inputs, _, weight in b if weight}

    alone = held_out(1)

    assert sum(alone.values()) == pytest.approx(1)
    assert all(held_out(world_size) == alone for world_size in (2, 3, 5))
