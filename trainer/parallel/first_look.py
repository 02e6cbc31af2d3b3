"""Refuses with `--parallel auto` what cannot fit at all, before torch is imported and the workers meet.

A refusal by then is a wrong command line, and the job ends at once. Later it is a failure of a worker, and restarted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elaunch.trainer.gpt.config import ConfigError, TrainConfig
from elaunch.trainer.memory.room import Room, shared_by, tightest_room
from elaunch.trainer.parallel.candidates import WorkerCount, candidates
from elaunch.trainer.parallel.choice import PlanOption, PlanRoom, refusal
from elaunch.trainer.parallel.estimate import WorkerSpeed, estimate
from elaunch.trainer.ranks.place import RankInfo

# Devices of GPUs. Their memory is known only to torch.
_GPUS = ("/dev/nvidiactl", "/dev/kfd")


def require_room(config: TrainConfig, place: RankInfo, environ: Mapping[str, str], node: Room | None = None) -> None:
    """Raise ConfigError if each plan needs more than a worker may take on CPUs. `node` is the node's room, for tests.

    What the process itself and copies of the state take is not counted yet. All ranks call this; on several nodes it
    does nothing, since their ranks may differ.
    """
    if node is None and any(Path(device).exists() for device in _GPUS):
        return
    if int(environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        return
    of_node = int(environ.get("LOCAL_WORLD_SIZE", place.world_size))
    found = candidates(WorkerCount(place.world_size, of_node), config.shape, needs_ddp=config.needs_ddp)
    node = node or tightest_room()
    room = PlanRoom(node.most // of_node, shared_by(of_node, node))
    options = [
        PlanOption(each, estimate(each.plan, each.sizes, config.shape, WorkerSpeed(), bf16=config.bf16))
        for each in found
    ]
    if options and min(each.needs for each in options) > room.bytes:
        raise ConfigError(refusal(options, room))
