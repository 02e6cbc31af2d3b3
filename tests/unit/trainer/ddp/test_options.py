"""DDP's options: what is refused, with the reason and the way out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elaunch.trainer.ddp.options import HOOKS, DdpOptions
from elaunch.trainer.gpt.config import ConfigError, TrainConfig, parse
from elaunch.trainer.ranks.place import RankInfo
from tests.harness import RUN_LIMIT_S

TWO = RankInfo(rank=0, world_size=2, launched=True)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--comm-hook noop", "no survivor of a failure has the state of the job; examples/ddp/hooks.py"),
        ("--comm-hook post-local-sgd", "examples/ddp/local_sgd.py keeps the state after each average"),
        ("--comm-hook fp8", "--comm-hook fp8: there is no such hook; there are none, fp16, bf16, quantised, powersgd"),
        ("--comm-hook a.b:c.d", "there is no such hook"),
        ("--powersgd-rank 2", "--powersgd-rank 2 has a meaning with --comm-hook powersgd and batched-powersgd only"),
        ("--comm-hook fp16 --powersgd-rank 5", "not with fp16; leave it out"),
        ("--bucket-mb 0", "--bucket-mb"),
        ("--parallel fsdp2 --comm-hook fp16", "--comm-hook fp16 is DDP's, and --parallel fsdp2 has no DDP"),
        ("--parallel fsdp2 --bucket-mb 1", "--bucket-mb is DDP's"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_or_kept_is_one_sentence(argv: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv.split(), TWO)

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hook", [*HOOKS, "hooks.mine:top_k"])
@pytest.mark.parametrize("parallel", ["ddp", "zero1"])
def test_a_hook_whose_ranks_stay_equal_is_taken(hook: str, parallel: str) -> None:
    config = parse(["--comm-hook", hook, "--parallel", parallel], TWO)

    assert config
    assert config.ddp.hook == hook


def test_options_become_those_of_ddp() -> None:
    config = parse(["--comm-hook", "powersgd", "--powersgd-rank", "4", "--bucket-mb", "0.5"], TWO)

    assert config
    assert config.ddp == DdpOptions("powersgd", powersgd_rank=4, bucket_mb=0.5)
    assert len(config.ddp.given()) == 3
    assert TrainConfig().ddp == DdpOptions()
    assert TrainConfig().ddp.given() == []


def test_a_hook_makes_another_run_and_a_buckets_size_does_not() -> None:
    assert TrainConfig(comm_hook="fp16").identity != TrainConfig().identity
    assert TrainConfig(bucket_mb=1.0).identity == TrainConfig().identity
    # A run directory of before these options has none of them.
    assert TrainConfig().identity["comm_hook"] is None


def test_the_options_do_not_import_torch() -> None:
    code = "import sys, elaunch.trainer.ddp.options; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=RUN_LIMIT_S).returncode == 0
