"""The environment of a worker: torchrun's variables, unchanged in name and meaning, and elaunch's; its preloads."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template
from typing import TYPE_CHECKING

from elaunch.agent.guardian.guardian import VARIABLE
from elaunch.rendezvous.rules.assign_ranks import role_place

if TYPE_CHECKING:
    from elaunch.rendezvous.types import RankTable

# The imports of a training script and its optimizers; torch._dynamo alone is most of a first optimizer step's delay.
DEFAULT_PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
# Packages that are preloaded too if the program imports them; `make ecosystem` runs programs that use them.
PACKAGES = frozenset(
    (
        *("accelerate", "datasets", "hydra", "ignite", "lightning", "peft", "pytorch_lightning", "timm"),
        *("torchmetrics", "torchvision", "transformers", "trl"),
    )
)

# The agent sets these for each worker; those of an outer launcher must not be inherited.
RANK_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
        *("ELAUNCH_GENERATION", "ELAUNCH_GENERATION_SECRET", "ELAUNCH_HANG_TIMEOUT", "ELAUNCH_LINK", "ELAUNCH_MEMORY"),
        *("ELAUNCH_DEBUG", "ELAUNCH_SCHEDULER"),
    )
)

# Further variables of the job that a worker belongs to.
_OF_ONE_JOB = frozenset((VARIABLE, "TORCHELASTIC_SIGNALS_TO_HANDLE"))


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a new job that is submitted with `environ`: in a worker, without the variables of its job.

    The user's own variables stay, such as ELAUNCH_ENDPOINT, and an ELAUNCH_TOKEN or PET_ variable that the worker set.
    """
    if VARIABLE not in environ:
        return dict(environ)
    return {name: value for name, value in environ.items() if name not in RANK_VARIABLES | _OF_ONE_JOB}


def rank_variables(
    table: RankTable, group_rank: int, local_rank: int, *, agent_store: bool, error_file: str, memory: str
) -> dict[str, str]:
    """The variables of one worker, on top of those of all workers.

    All workers get `environment` and `worker_env` of the agent's configuration.

    `agent_store`: the worker store of MASTER_ADDR:MASTER_PORT has a process of its own, so that rank 0
    connects to it instead of hosting it. `memory` is a folder of the job's on this host, which outlives workers, or
    empty where there is none. Meanings: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    seat = table.seats[group_rank]
    rank = seat.first_rank + local_rank
    role = role_place(table.seats, group_rank, local_rank)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(group_rank),
        "ROLE_RANK": str(role.rank),
        "ROLE_NAME": role.name,
        "LOCAL_WORLD_SIZE": str(seat.slots),
        "WORLD_SIZE": str(table.world_size),
        "GROUP_WORLD_SIZE": str(len(table.seats)),
        "ROLE_WORLD_SIZE": str(role.world_size),
        "MASTER_ADDR": table.master_addr,
        "MASTER_PORT": str(table.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(table.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "ELAUNCH_GENERATION": str(table.generation),
        **({"ELAUNCH_GENERATION_SECRET": table.secret} if table.secret else {}),
        **({"ELAUNCH_MEMORY": memory} if memory else {}),
    }


def extensions_root(environ: Mapping[str, str]) -> str:
    """Where torch builds extensions (torch/utils/cpp_extension.py, torch/_appdirs.py); empty if that is not known."""
    cache = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return environ.get("TORCH_EXTENSIONS_DIR") or (f"{cache}/torch_extensions" if cache else "")


def terminal_variables(inherited: Mapping[str, str], columns: int, rows: int) -> dict[str, str]:
    """Variables by which rich and tqdm draw as on a terminal, for a worker whose pipes end at one of that size.

    tqdm reads both sizes. TTY_COMPATIBLE is rich's (since 14). The user's own values have precedence.
    """
    ours = {"COLUMNS": str(columns), "LINES": str(rows), "TTY_COMPATIBLE": "1"}
    return {name: value for name, value in ours.items() if name not in inherited}


def one_gpu(inherited: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """--virtual-local-rank: every worker is local rank 0 and sees the one GPU that would have been its own."""
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    device = visible.split(",")[local_rank].strip() if visible is not None else str(local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


def arguments(args: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """The program's arguments for one worker: `${local_rank}` is replaced, and `$$` stands for `$`, as in torchrun."""
    return tuple(Template(arg).safe_substitute(local_rank=local_rank) for arg in args)
