"""What no plan has memory for is refused before torch is imported; what may fit is not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from elaunch.trainer.gpt.config import ConfigError, TrainConfig
from elaunch.trainer.memory.room import Room
from elaunch.trainer.parallel.first_look import require_room
from elaunch.trainer.ranks.place import RankInfo
from tests.harness import RUN_LIMIT_S

TWO = RankInfo(world_size=2, launched=True)
CONFIG = TrainConfig(parallel="auto", layers=8, width=512)
GB = 1_000_000_000


def test_a_network_that_no_plan_has_memory_for_is_refused_in_one_sentence() -> None:
    room = Room(100, "the cgroup /job (memory.max 300.0 MB)", 300_000_000)

    with pytest.raises(ConfigError) as caught:
        require_room(CONFIG, TWO, {"LOCAL_WORLD_SIZE": "2"}, room)

    said = str(caught.value)
    assert "may take 0.14 GiB: the cgroup /job (memory.max 300.0 MB), for 2 workers; give the job more memory" in said
    assert "\n" not in said
    # On a node for itself each worker has twice as much.
    require_room(CONFIG, TWO, {"LOCAL_WORLD_SIZE": "1"}, Room(100, "the cgroup", 600_000_000))
    require_room(CONFIG, TWO, {}, Room(100, "the machine", 64 * GB))


def test_an_option_of_ddp_leaves_fewer_plans_that_may_fit() -> None:
    room = Room(100, "the cgroup", 800_000_000)
    require_room(CONFIG, TWO, {}, room)

    with pytest.raises(ConfigError, match="The smallest is zero1"):
        require_room(replace(CONFIG, bucket_mb=1.0), TWO, {}, room)


def test_it_needs_no_torch() -> None:
    code = "import sys, elaunch.trainer.parallel.first_look; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=RUN_LIMIT_S).returncode == 0
