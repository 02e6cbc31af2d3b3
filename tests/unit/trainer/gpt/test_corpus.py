"""Text over many files: listed at the start, read only where needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elaunch.trainer.gpt.config import ConfigError, TrainConfig
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.parallel.plan import DataShare
from elaunch.trainer.train import Windows

CPU = torch.device("cpu")
ALONE = DataShare(0, 1, leads=True)


def write_files(folder: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes((i * 7 + len(name)) % 251 for i in range(size)))


def config_for(folder: Path | None, context: int = 8, global_batch: int = 4) -> TrainConfig:
    return TrainConfig(data=folder, context=context, global_batch=global_batch, micro_batch=2)


def read_step(windows: Windows, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batches of a step, one after the other."""
    read = [windows.of(step, [micro]) for micro in windows.order.parts(step, rank=0, world_size=1)]
    inputs, targets = zip(*read, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def test_a_read_across_files_is_a_slice_of_all_of_them(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": 100, "b": 3, "c": 50, "sub/d": 200, "sub/e": 1})
    corpus = Corpus.open(config_for(tmp_path))
    whole = b"".join((tmp_path / file.name).read_bytes() for file in corpus.files)

    for start, length in [(0, 354), (0, 1), (353, 1), (90, 120), (99, 2), (100, 3)]:
        assert corpus.read(start, length) == whole[start : start + length]


def test_held_out_text_is_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a": 3000, "b": 2000})
    config = config_for(tmp_path)
    corpus = Corpus.open(config)
    windows = Windows(config, corpus, ALONE, CPU)
    spans: list[tuple[int, int]] = []
    real_read = corpus.read
    monkeypatch.setattr(corpus, "read", lambda start, n: spans.append((start, start + n)) or real_read(start, n))

    epoch = [read_step(windows, step) for step in range(1, windows.order.steps(1) + 1)]
    trained = {byte for start, end in spans for byte in range(start, end)}
    spans.clear()
    held_out = list(windows.held_out())
    evaluated = {byte for start, end in spans for byte in range(start, end)}

    assert epoch
    assert held_out
    assert trained.isdisjoint(evaluated)
    assert max(evaluated) < corpus.size


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


def test_the_order_of_files_does_not_depend_on_the_file_system(tmp_path: Path) -> None:
    names = {f"f{number}": 100 for number in range(20)}
    write_files(tmp_path / "one", names)
    write_files(tmp_path / "two", dict(reversed(names.items())))

    one, two = Corpus.open(config_for(tmp_path / "one")), Corpus.open(config_for(tmp_path / "two"))

    assert one.files == two.files
    assert one.summary == two.summary


def test_a_single_file_and_linked_files_count_and_hidden_ones_do_not(tmp_path: Path) -> None:
    write_files(tmp_path, {"one": 600, ".hidden": 600})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "one")
    (tmp_path / "folder" / "circle").symlink_to(tmp_path)

    assert Corpus.open(config_for(tmp_path / "one")).read(0, 3) == (tmp_path / "one").read_bytes()[:3]
    assert {file.name for file in Corpus.open(config_for(tmp_path)).files} == {"one", "folder/link"}


@pytest.mark.parametrize("size", [0, 100])
def test_too_little_text_is_refused_with_the_least_that_works(tmp_path: Path, size: int) -> None:
    write_files(tmp_path, {"a": size})

    with pytest.raises(ConfigError, match=rf", {size} bytes\) is too short; .*--context 8 need at least 181 bytes"):
        Corpus.open(config_for(tmp_path))

    write_files(tmp_path, {"a": 181})
    assert Corpus.open(config_for(tmp_path)).size == 181
