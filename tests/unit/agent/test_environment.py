"""agent.environment: a worker's environment, with torchrun's names and meanings."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.agent.environment import RANK_VARIABLES, arguments, one_gpu, outside, rank_variables
from elaunch.rendezvous.rules.snapshot import seats_of
from elaunch.rendezvous.types import RankTable

TABLE = RankTable(
    generation=4,
    seats=seats_of([("a-00000001", 2, "trainer"), ("b-00000001", 3, "trainer")]),
    master_addr="host-a",
    master_port=29511,
    reason="restart 2 of 3",
    secret="c0ffee",
    restarts=2,
)


def variables(group_rank: int = 1, local_rank: int = 1) -> dict[str, str]:
    files = {"error_file": "/run/error.json", "memory": "/dev/shm/mine"}
    return rank_variables(TABLE, group_rank, local_rank, agent_store=True, **files)


def test_a_worker_gets_torchruns_variables_and_its_generation() -> None:
    assert variables() == {
        "LOCAL_RANK": "1",
        "RANK": "3",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "3",
        "WORLD_SIZE": "5",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "host-a",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/error.json",
        "ELAUNCH_GENERATION": "4",
        "ELAUNCH_GENERATION_SECRET": "c0ffee",
        "ELAUNCH_MEMORY": "/dev/shm/mine",
    }


def test_the_ranks_of_all_nodes_are_without_holes() -> None:
    ranks = [int(variables(g, n)["RANK"]) for g, seat in enumerate(TABLE.seats) for n in range(seat.slots)]

    assert ranks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("inherited", "device"),
    [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4, 6 ,7"}, "6"), ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-b")],
)
def test_a_virtual_local_rank_is_0_on_the_gpu_that_would_have_been_its_own(
    inherited: dict[str, str], device: str
) -> None:
    assert one_gpu(inherited, 1) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--device=${local_rank}", "--device=2"),
        ("$local_rank", "2"),
        ("$$local_rank", "$local_rank"),
        ("${HOME}", "${HOME}"),
        ("5$", "5$"),
        ("", ""),
    ],
)
def test_local_rank_is_replaced_in_arguments_and_nothing_else_is(given: str, expected: str) -> None:
    assert arguments((given,), 2) == (expected,)


def test_a_job_that_a_worker_hands_in_inherits_nothing_of_the_workers_job() -> None:
    users = {
        "PATH": "/bin",
        "PET_MAX_RESTARTS": "9",
        "ELAUNCH_ENDPOINT": "etcd:2379",
        "ELAUNCH_TOKEN": "0123456789abcdef",
    }
    named = {"ELAUNCH_MARKER": "c0ffee", "ELAUNCH_SCHEDULER": "0badf00d", "ELAUNCH_DEBUG": "start"}
    elastic = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_SIGNALS_TO_HANDLE")
    of_all = dict.fromkeys((*elastic, "ELAUNCH_HANG_TIMEOUT"), "x")
    worker = {**users, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **named, **of_all, **variables(), "ELAUNCH_LINK": "3"}

    inherited = outside(worker)

    assert inherited == {**users, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert worker.keys() >= RANK_VARIABLES


def test_the_page_of_variables_has_all_that_a_worker_gets() -> None:
    page = (Path(__file__).parents[3] / "docs" / "variables.md").read_text()

    assert [name for name in sorted(RANK_VARIABLES) if f"`{name}" not in page] == []
