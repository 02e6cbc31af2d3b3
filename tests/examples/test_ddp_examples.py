"""The examples of DDP: each shows what it says, and those that train go on after a kill as if there had been none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, killed_once, launched, told, weights
from tests.ranks import RankForker

# For each example the arguments of a short run, and what it must print.
SHOWN = {
    "uneven_inputs.py": ((), r"divided by all ranks: +weight -4\.00"),
    "batch_norm.py": ((), r"SynchronisedNorm over 2 ranks: outputs, buffers and gradients of one batch of 16"),
    "sparse_gradients.py": ((), r"sparse: 12 rows"),
    "buckets.py": ((), r"usual: +\S+ a\|b\|c a\|b\|c"),
    "two_devices.py": ((), r"rank 1: halves on cpu and cpu"),
    "own_hook.py": (("12",), r"a step sends 1,\d+ bytes from each rank, of 67,588 bytes of gradient"),
    "local_sgd.py": (("4",), r"round 2: whole gradients, .* apart 0\n"),
    "gossip.py": (("20",), r"step 20: loss .*, ranks apart by 0\.\d+"),
    "hooks.py": (("6",), r"powersgd +\d+\.\d\d ms"),
    "data_parallel.py": ((), r"no GPU: DataParallel is the module itself"),
}
TRAINING = {"own_hook.py": (200, r"step 40"), "local_sgd.py": (60, r"round 10"), "gossip.py": (400, r"step 50")}


# Two ranks of one take 0.1 s of CPU time, as they are forked.
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_it_says(forker: RankForker, name: str) -> None:
    args, shown = SHOWN[name]

    assert re.search(shown, told(forker, f"ddp/{name}", *args))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs_under_elaunch_with_three_workers(tmp_path: Path, name: str) -> None:
    args, _ = SHOWN[name]

    assert "failed" not in launched(tmp_path, str(EXAMPLES / "ddp" / name), *args, ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_a_killed_worker_changes_nothing_in_the_result(tmp_path: Path, name: str) -> None:
    steps, after = TRAINING[name]
    calm = launched(tmp_path, str(EXAMPLES / "ddp" / name), str(steps))

    struck = killed_once(tmp_path, f"ddp/{name}", steps, after=after)

    assert weights(struck) == weights(calm)
    # Not from the beginning: the state of before is there.
    assert re.search(r"(restored step|goes on after step) [1-9]", struck), struck
