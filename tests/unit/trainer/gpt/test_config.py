"""The trainer's options: what is refused, and what makes two runs the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.trainer.gpt.config import ConfigError, RunDirectory, TrainConfig, parse
from elaunch.trainer.gpt.corpus import Corpus
from elaunch.trainer.ranks import RankInfo

TWO = RankInfo(rank=0, world_size=2, launched=True)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--global-batch", "8", "--micro-batch", "3"], "of micro_batch (3); use micro_batch 2 or global_batch 9"),
        (["--global-batch", "3", "--micro-batch", "3"], "2 workers are more than the 1 micro-batches of a step"),
        (["--global-batch", "1"], "use at most 1 workers, or global_batch 2"),
        (["--micro-batch", "5"], "--micro-batch: global_batch (24) is not a multiple of micro_batch (5)"),
        (["--width", "30", "--heads", "4"], "--width (30) is not divisible by --heads (4); use --width 32"),
        (["--stepz", "3"], "--stepz"),
        (["--parallel", "fsdp3"], "--parallel fsdp3: there is no plan 'fsdp3'; use one of ddp"),
        (["--parallel", "dp=4"], "--parallel dp=4 is for 4 workers, and there are 2; use numbers"),
        (["--profile", "ten"], "--profile: 'ten' is neither a number of steps nor a range; give 3, or 10-12"),
        (["--profile", "10-12", "--steps", "11"], "--profile 10-12 ends with step 12, and --steps is 11; give fewer"),
        (["--bucket-mb", "5", "--parallel", "tp=2"], "--bucket-mb is DDP's, and --parallel tp=2 has no DDP"),
        (["--comm-hook", "int8"], "'int8' is not one of 'fp16', 'bf16', 'powersgd'"),
        (["--comm-hook", "powersgd", "--bucket-mb", "1"], "and so does --bucket-mb; leave one out"),
        (["--tune-comm", "--bucket-mb", "1"], "--bucket-mb decides the size of DDP's buckets, and so does --tune-comm"),
        (["--checkpoints", "s33://bucket/run"], "s33://bucket/run cannot be used: Protocol not known: s33"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence_with_its_values(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv, TWO)

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_with_auto_only_what_no_plan_can_do_is_refused_by_the_options() -> None:
    # Two workers can share one micro-batch if they share the model.
    assert parse(["--parallel", "auto", "--global-batch", "1", "--tune-comm", "--compile"], TWO)

    with pytest.raises(ConfigError, match="not a multiple of micro_batch"):
        parse(["--parallel", "auto", "--global-batch", "8", "--micro-batch", "3"], TWO)
    with pytest.raises(ConfigError, match="--checkpoints: s33://bucket/run"):
        parse(["--parallel", "auto", "--checkpoints", "s33://bucket/run"], TWO)


@pytest.mark.parametrize("batch", [2, 3, 7, 8, 9, 16, 21, 24, 25, 32, 100])
def test_a_global_batch_alone_is_cut_so_that_it_fits(batch: int) -> None:
    config = parse(["--global-batch", str(batch)], TWO)

    assert config
    many, rest = divmod(batch, config.micro_batch)
    assert rest == 0
    assert many >= min(batch, 8)
    # A run stays the same run with more or fewer workers.
    assert all(
        parse(["--global-batch", str(batch)], replace(TWO, world_size=world_size)) == config
        for world_size in range(1, min(many, 8) + 1)
    )


def test_under_torchrun_each_restart_is_a_generation() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}

    assert [RankInfo.from_environ(environ | own).generation for own in ({}, {"ELAUNCH_GENERATION": "5"})] == [3, 5]


def test_help_is_printed_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--help"], RankInfo(rank=1, world_size=2, launched=True)) is None
    assert capsys.readouterr().out == ""

    assert parse(["--help"], TWO) is None
    assert "--checkpoint-every" in capsys.readouterr().out


def test_without_out_the_same_options_find_the_same_directory() -> None:
    assert TrainConfig().out_path == TrainConfig(checkpoint_every=3, ledger=True, eval_every=9).out_path
    assert TrainConfig().out_path != TrainConfig(seed=1).out_path
    # Their checkpoints are not of one kind.
    assert TrainConfig().out_path != TrainConfig(parallel="fsdp2").out_path
    # More or fewer replicas are the same run.
    assert TrainConfig(parallel="dp=2,tp=2").out_path == TrainConfig(parallel="tp=2").out_path
    assert TrainConfig().out_path.parent == Path("runs")


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunDirectory, TrainConfig, Corpus]:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    config = TrainConfig(data=tmp_path / "text", context=16, out=tmp_path / "out")
    return RunDirectory(config.out_path), config, Corpus.open(config)


def test_a_directory_refuses_another_configuration(run: tuple[RunDirectory, TrainConfig, Corpus]) -> None:
    directory, config, corpus = run
    directory.claim(config, corpus.summary)
    before = (directory.path / "config.yaml").read_text()

    with pytest.raises(
        ConfigError, match=r"holds a run with seed 0, width 128, not seed 5, width 64; give another --out"
    ):
        directory.claim(replace(config, width=64, seed=5), corpus.summary)

    assert (directory.path / "config.yaml").read_text() == before


def test_checkpoints_of_an_unknown_run_are_not_taken_over(run: tuple[RunDirectory, TrainConfig, Corpus]) -> None:
    directory, config, corpus = run
    folder = directory.checkpoints / "generation-0000-step-00000001.0a0b0c0d"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()

    with pytest.raises(ConfigError, match=r"holds checkpoints but no config\.yaml"):
        directory.claim(config, corpus.summary)


@pytest.mark.parametrize("place", ["memory://bucket/{}", "file://{}/there", "{}/there"])
def test_checkpoints_elsewhere_belong_to_one_run(
    run: tuple[RunDirectory, TrainConfig, Corpus], tmp_path: Path, place: str
) -> None:
    _, config, corpus = run
    place = place.format(tmp_path)
    config = replace(config, checkpoints=place)

    # On another machine nothing is left of --out.
    for out in ("one", "other"):
        RunDirectory(tmp_path / out, place).claim(config, corpus.summary)
    with pytest.raises(
        ConfigError, match=r"--checkpoints .* holds a run with seed 0, not seed 5; give another --check"
    ):
        RunDirectory(tmp_path / "third", place).claim(replace(config, seed=5), corpus.summary)


def test_checkpoints_elsewhere_that_cannot_be_reached_stop_a_start_but_no_restart(
    run: tuple[RunDirectory, TrainConfig, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(MemoryFileSystem, "info", away)
    _, config, corpus = run
    place = "memory://bucket/away"
    directory = RunDirectory(tmp_path / "out", place)

    with pytest.raises(ConfigError, match=r"--checkpoints memory://bucket/away cannot be used \(connection"):
        directory.claim(replace(config, checkpoints=place), corpus.summary)
    directory.claim(replace(config, checkpoints=place), corpus.summary, again=True)
