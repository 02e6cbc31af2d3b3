"""1 to 12: what a worker finds in its environment."""

from __future__ import annotations

from tests.conformance.behaviours.behaviour import Behaviour
from tests.conformance.trial import MEET, SAY, Expected, Trial

_OPTIONS = "tests/unit/launcher/options/test_options.py"
_INHERITED = f"{_OPTIONS}::test_workers_inherit_the_environment_without_the_variables_of_an_outer_launcher"

# Two agents on one host, as in torchrun's own tests. No token is typed.
MEETING = "--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint localhost:{{port}} --rdzv-id trial"
TWO = MEETING.format(nodes="2")
_PLACES = "LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE GROUP_WORLD_SIZE MASTER_PORT"

TWO_AGENTS = Trial(
    args=f"{TWO} --nproc-per-node 2 --role actor train.py {_PLACES}",
    also=(f"{TWO} --nproc-per-node 1 --role learner train.py {_PLACES}",),
    torchrun=Expected(
        says=(
            r"rank 0: .* WORLD_SIZE=3 .* GROUP_WORLD_SIZE=2",
            r"rank 1: .* WORLD_SIZE=3 ",
            r"rank 2: .* WORLD_SIZE=3 ",
            r"LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 WORLD_SIZE=3 ROLE_NAME=actor ROLE_RANK=0 ROLE_WORLD_SIZE=2",
            r"LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 WORLD_SIZE=3 ROLE_NAME=actor ROLE_RANK=1 ROLE_WORLD_SIZE=2",
            r"LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 WORLD_SIZE=3 ROLE_NAME=learner ROLE_RANK=0 ROLE_WORLD_SIZE=1",
        ),
        same=r"MASTER_PORT=(\d+)",
    ),
)
_GROUP_RANKS = Trial(
    args=f"{TWO} train.py RANK GROUP_RANK GROUP_WORLD_SIZE",
    also=(f"{TWO} train.py RANK GROUP_RANK GROUP_WORLD_SIZE",),
    torchrun=Expected(says=(r"GROUP_RANK=0 GROUP_WORLD_SIZE=2", r"GROUP_RANK=1 GROUP_WORLD_SIZE=2")),
)

# Ranks to which the agents give different addresses are no job of two.
_JOINED = f"""{MEET}
if WORLD_SIZE == 2:
    place = f"{{os.environ['MASTER_ADDR']}}:{{os.environ['MASTER_PORT']}}"
    Path(f"place.{{RANK}}.new").write_text(place)
    os.replace(f"place.{{RANK}}.new", f"place.{{RANK}}")
    wait_for_file(f"place.{{1 - RANK}}")
    if Path(f"place.{{1 - RANK}}").read_text() != place:
        say("has another address")
        sys.exit(1)
    say(f"together at {{place}} after {{os.environ['TORCHELASTIC_RESTART_COUNT']}} restarts")
    sys.exit(0)
meet()
time.sleep(600)
"""
_RANGE = f"{MEETING.format(nodes='1:2')} --rdzv-conf last_call_timeout=1,read_timeout=5,join_timeout=60 train.py"
_TOGETHER = Expected(says=("rank 0: together", "rank 1: together"), same=r"together at \S+:(\d+) after 0 restarts")
JOIN = Trial(
    program=_JOINED,
    args=_RANGE,
    also=(_RANGE,),
    after="all ready",
    # The joiner waits for an address that is never written, or takes its own, and the healthy job dies with it.
    torchrun=Expected(code=1, never=("together",)),
    elaunch=_TOGETHER,
)
JOIN_WITH_SWITCH = Trial(
    program=_JOINED,
    args=_RANGE,
    also=(_RANGE,),
    after="all ready",
    env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    torchrun=_TOGETHER,
)

_REDUCE = """
import os, sys
import torch
import torch.distributed as dist

if sys.argv[1] == "env":
    dist.init_process_group("gloo", init_method="env://")
else:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(f"by {sys.argv[1]}: {int(total)}, elastic {dist.is_torchelastic_launched()}", flush=True)
dist.destroy_process_group()
"""
# A job for each: a second group of the same process would find the first one's addresses in the store.
_BY_ENV, _BY_TCP = (
    Trial(
        args=f"--nproc-per-node 2 train.py {method}",
        program=_REDUCE,
        needs_torch=True,
        torchrun=Expected(says=(f"by {method}: 3, elastic True",)),
    )
    for method in ("env", "tcp")
)

BEHAVIOURS = (
    Behaviour(
        number=1,
        fact="A worker has torchrun's 17 variables, in the same formats",
        differs="`MASTER_ADDR` is an address, where torchrun gives a name: clusters without DNS cannot look that up",
        trials=(
            Trial(
                args="--nproc-per-node 2 --max-restarts 1 train.py LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME"
                " LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
                " TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE",
                torchrun=Expected(
                    says=(
                        "rank 1: LOCAL_RANK=1 RANK=1 GROUP_RANK=0 ROLE_RANK=1 ROLE_NAME=default LOCAL_WORLD_SIZE=2"
                        " WORLD_SIZE=2 GROUP_WORLD_SIZE=1 ROLE_WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=0"
                        " TORCHELASTIC_MAX_RESTARTS=1 TORCHELASTIC_USE_AGENT_STORE=True$",
                    )
                ),
            ),
            Trial(
                args="train.py MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE",
                torchrun=Expected(
                    says=(
                        r"MASTER_ADDR=\S+ MASTER_PORT=\d+ TORCHELASTIC_RUN_ID=\S+"
                        r" TORCHELASTIC_ERROR_FILE=/\S+/error\.json$",
                    )
                ),
            ),
        ),
    ),
    Behaviour(
        number=2,
        fact="A worker inherits the launcher's environment, and the launcher's own values win",
        differs="except the `PET_` variables: they configured this job, not one that the worker starts",
        trials=(
            Trial(
                args="train.py COLOUR RANK WORLD_SIZE TORCHELASTIC_RESTART_COUNT",
                env={"COLOUR": "blue", "RANK": "17", "WORLD_SIZE": "64", "TORCHELASTIC_RESTART_COUNT": "9"},
                torchrun=Expected(says=("rank 0: COLOUR=blue RANK=0 WORLD_SIZE=1 TORCHELASTIC_RESTART_COUNT=0",)),
            ),
        ),
    ),
    Behaviour(
        number=3,
        fact="`RANK` counts the workers of lower nodes first; nodes may have different numbers of workers",
        trials=(TWO_AGENTS,),
    ),
    Behaviour(
        number=4,
        fact="`ROLE_RANK` and `ROLE_WORLD_SIZE` are counted in each role; `ROLE_NAME` is `--role`",
        differs="a lost node's seat is for a node of its role, and a job waits for a role that no node has any more;"
        " torchrun takes any node, and continues without the role",
        trials=(TWO_AGENTS,),
    ),
    Behaviour(
        number=5,
        fact="`GROUP_RANK` numbers the nodes from 0, and `GROUP_WORLD_SIZE` is their number in this round",
        trials=(_GROUP_RANKS,),
        proofs=("tests/unit/agent/test_environment.py::test_the_ranks_of_all_nodes_are_without_holes",),
    ),
    Behaviour(
        number=6,
        fact="All workers of a round have one `MASTER_ADDR` and `MASTER_PORT`",
        differs="also after a node has joined or was replaced. torchrun 2.13 then ends the whole job, unless"
        " `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set",
        trials=(TWO_AGENTS, JOIN, JOIN_WITH_SWITCH),
        proofs=(
            "tests/faults/test_nodes_boundary.py"
            "::test_a_node_that_joins_has_all_ranks_of_two_agents_stop_after_the_same_step",
            "tests/e2e/test_life.py::test_the_ranks_of_a_generation_meet_at_one_address",
        ),
    ),
    Behaviour(
        number=7,
        fact="`init_process_group()` works with `env://` and with `tcp://MASTER_ADDR:MASTER_PORT`",
        differs="also with `tcp://` or `MASTER_PORT` at a port of the script's own, where rank 0 hosts the store; with"
        " torchrun each rank waits for a server there",
        trials=(_BY_ENV, _BY_TCP),
        proofs=("tests/e2e/test_life.py::test_every_rank_gets_the_sum_over_all_ranks",),
    ),
    Behaviour(
        number=8,
        fact="`torch.distributed.is_torchelastic_launched()` is true",
        trials=(_BY_ENV, _BY_TCP),
        proofs=("tests/e2e/test_life.py::test_torch_sees_an_elastic_launch_whose_store_the_agent_hosts",),
    ),
    Behaviour(
        number=9,
        fact="`OMP_NUM_THREADS` is kept if it is set, else 1 for several workers and unset for one",
        differs="unset, it becomes the cores divided by the workers, also for one worker",
        trials=(
            Trial(
                args="--nproc-per-node 2 train.py OMP_NUM_THREADS",
                torchrun=Expected(says=("rank 0: OMP_NUM_THREADS=1$",)),
                elaunch=Expected(says=(r"rank 0: OMP_NUM_THREADS=\d+$",)),
            ),
            Trial(
                args="--nproc-per-node 1 train.py OMP_NUM_THREADS",
                torchrun=Expected(says=("rank 0: OMP_NUM_THREADS=None$",)),
                elaunch=Expected(says=(r"rank 0: OMP_NUM_THREADS=\d+$",)),
            ),
            Trial(
                args="--nproc-per-node 2 train.py OMP_NUM_THREADS",
                env={"OMP_NUM_THREADS": "7"},
                torchrun=Expected(says=("rank 1: OMP_NUM_THREADS=7$",)),
            ),
        ),
        proofs=(
            f"{_OPTIONS}::test_a_chosen_number_of_threads_is_kept_and_a_single_worker_gets_all_cores",
            f"{_OPTIONS}::test_defaults_that_differ_from_torchruns_are_one_detail_and_no_note",
        ),
    ),
    Behaviour(
        number=10,
        fact="`TORCH_NCCL_ASYNC_ERROR_HANDLING` is kept if it is set, else 1",
        differs="unset, it becomes 3, which is torch's own default: with 1 a failed collective looks finished",
        trials=(
            Trial(
                args="train.py TORCH_NCCL_ASYNC_ERROR_HANDLING",
                torchrun=Expected(says=("HANDLING=1$",)),
                elaunch=Expected(says=("HANDLING=3$",)),
            ),
            Trial(
                args="train.py TORCH_NCCL_ASYNC_ERROR_HANDLING",
                env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
                torchrun=Expected(says=("HANDLING=2$",)),
            ),
        ),
        proofs=(_INHERITED,),
    ),
    Behaviour(
        number=11,
        fact="`CUDA_VISIBLE_DEVICES` is left as it is",
        trials=(
            Trial(
                args="--nproc-per-node 2 train.py LOCAL_RANK CUDA_VISIBLE_DEVICES",
                env={"CUDA_VISIBLE_DEVICES": "3,5"},
                torchrun=Expected(says=("LOCAL_RANK=1 CUDA_VISIBLE_DEVICES=3,5$",)),
            ),
        ),
        proofs=(_INHERITED,),
    ),
    Behaviour(
        number=12,
        fact="`--virtual-local-rank` gives each worker `LOCAL_RANK=0` and one GPU of `CUDA_VISIBLE_DEVICES`",
        differs="too few GPUs are a usage error (2) before anything starts; torchrun fails while it starts workers",
        trials=(
            Trial(
                args="--virtual-local-rank --nproc-per-node 2 train.py LOCAL_RANK CUDA_VISIBLE_DEVICES",
                env={"CUDA_VISIBLE_DEVICES": "3,5"},
                torchrun=Expected(
                    says=(
                        "rank 0: LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=3$",
                        "rank 1: LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=5$",
                    )
                ),
            ),
            Trial(
                args="--virtual-local-rank --nproc-per-node 2 train.py",
                env={"CUDA_VISIBLE_DEVICES": "3"},
                program=SAY,
                torchrun=Expected(code=1, says=("ValueError",)),
                elaunch=Expected(code=2, says=("CUDA_VISIBLE_DEVICES=3 names 1",)),
            ),
        ),
    ),
)
