"""21 to 26: numbers of nodes, workers and restarts, and the port of a job on one node."""

from __future__ import annotations

from tests.conformance.behaviours.behaviour import Behaviour
from tests.conformance.behaviours.workers import MEETING
from tests.conformance.trial import SAY, Expected, Trial

_OPTIONS = "tests/unit/launcher/options/test_options.py"
_SENTENCES = f"{_OPTIONS}::test_a_wrong_request_is_one_sentence_with_its_values_and_the_way_out"
_USAGE = "a usage error has exit code 2 and one message, torchrun's 1 and a traceback"


def _refused(args: str, theirs: str, ours: str) -> Trial:
    """A command line that no launcher accepts, with torchrun's exception and elaunch's sentence."""
    return Trial(
        args=f"{args} train.py",
        program=SAY,
        # No GPU on any host of the tests.
        env={"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        torchrun=Expected(code=1, says=(theirs,), never=("rank 0",)),
        elaunch=Expected(code=2, says=(ours,), never=("rank 0", "Traceback")),
    )


_STATIC = "--nnodes 2 --master-addr localhost --master-port {port} --node-rank"
_SEATS = "train.py GROUP_RANK MASTER_ADDR MASTER_PORT"

BEHAVIOURS = (
    Behaviour(
        number=21,
        fact="`--nnodes` is `N` or `MIN:MAX`, and a range starts with as many nodes as there are",
        differs=f"{_USAGE}. Waits 2 s for more nodes of a range, at the first start only; torchrun 30 s at each",
        trials=(
            _refused("--nnodes 2:3:4", "RuntimeError", "--nnodes 2:3:4 is neither a number of nodes nor a range"),
            _refused("--nnodes 0", "AssertionError", "--nnodes 0 is neither a number of nodes nor a range"),
            _refused("--nnodes 4:2", "AssertionError", "--nnodes 4:2 is neither a number of nodes nor a range"),
            Trial(
                args=f"{MEETING.format(nodes='1:2')} --rdzv-conf last_call_timeout=1 train.py GROUP_WORLD_SIZE",
                torchrun=Expected(says=("GROUP_WORLD_SIZE=1",)),
            ),
        ),
        proofs=(_SENTENCES, "tests/e2e/test_documented_commands.py::test_the_commands_for_an_etcd_work_on_one"),
    ),
    Behaviour(
        number=22,
        fact="`--nproc-per-node` is a number, `cpu`, `gpu` or `auto`",
        differs=f"the default is one worker per GPU, and 1 without a GPU; torchrun's is 1; {_USAGE}. `gpu` and `auto`"
        " count other vendors' accelerators too; `xpu`, `npu` and `hpu` need no torch that has them",
        trials=(
            Trial(args="--nproc-per-node cpu train.py WORLD_SIZE", torchrun=Expected(says=(r"WORLD_SIZE=\d+$",))),
            _refused("--nproc-per-node carrots", "ValueError", "--nproc-per-node carrots is neither a number nor"),
            _refused("--nproc-per-node gpu", "ValueError", "--nproc-per-node gpu finds no GPU"),
        ),
        proofs=(f"{_OPTIONS}::test_workers_are_counted_as_requested", _SENTENCES),
    ),
    Behaviour(
        number=23,
        fact="`--standalone` ignores `--rdzv-*`, takes a free port and a new id; two on one host stay separate jobs",
        differs="`--standalone --nnodes 2` is an immediate usage error; torchrun waits 600 s for the second node",
        trials=(
            Trial(
                args="--standalone --rdzv-backend c10d --rdzv-endpoint nowhere:1 --rdzv-id x train.py MASTER_PORT"
                " TORCHELASTIC_RUN_ID",
                also=(
                    "--standalone --rdzv-backend c10d --rdzv-endpoint nowhere:1 --rdzv-id x train.py MASTER_PORT"
                    " TORCHELASTIC_RUN_ID",
                ),
                torchrun=Expected(distinct=r"MASTER_PORT=(\d+)", never=("RUN_ID=x$",)),
            ),
            Trial(
                args="--standalone --nnodes 2 --rdzv-conf join_timeout=3 train.py",
                torchrun=Expected(code=1, says=("RendezvousTimeoutError",), seconds_min=3),
                elaunch=Expected(code=2, says=("--standalone contradicts --nnodes 2",), never=("rank 0",)),
            ),
        ),
        proofs=(
            f"{_OPTIONS}::test_a_standalone_job_has_a_name_of_its_own",
            "tests/unit/launcher/store/test_locate.py::test_one_node_is_alone_with_a_store_in_its_memory",
            _SENTENCES,
        ),
    ),
    Behaviour(
        number=24,
        fact="A job on one node without `--master-port` takes a free port",
        trials=(
            Trial(
                args="train.py MASTER_PORT",
                also=("train.py MASTER_PORT",),
                torchrun=Expected(distinct=r"MASTER_PORT=(\d+)"),
            ),
        ),
        proofs=(
            "tests/unit/agent/workers/test_spawn.py::test_without_a_wish_a_free_port_is_taken_a_fresh_one_each_time",
        ),
    ),
    Behaviour(
        number=25,
        fact="`--master-port` is `MASTER_PORT`; with `--master-addr` and `--node-rank` nodes have fixed ranks",
        differs="the job's own store takes the port after it; torchrun's is on that port itself. A failure on one node"
        " restarts the others too, which torchrun's static rendezvous does not",
        trials=(
            Trial(
                args="--master-port {port} train.py MASTER_ADDR MASTER_PORT",
                torchrun=Expected(says=(r"MASTER_ADDR=127\.0\.0\.1 MASTER_PORT=\d+$",)),
            ),
            Trial(
                args=f"{_STATIC} 0 {_SEATS}",
                also=(f"{_STATIC} 1 {_SEATS}",),
                torchrun=Expected(
                    says=("rank 0: GROUP_RANK=0 MASTER_ADDR=localhost", "rank 1: GROUP_RANK=1 MASTER_ADDR=localhost"),
                    same=r"MASTER_PORT=(\d+)",
                ),
            ),
        ),
        proofs=(
            "tests/faults/test_own_store.py"
            "::test_static_lines_of_torchrun_give_ranks_by_node_and_the_master_as_it_was_given",
            f"{_OPTIONS}::test_a_given_master_port_is_the_port_and_none_is_a_fresh_one",
        ),
    ),
    Behaviour(
        number=26,
        fact="`--max-restarts` is 0 unless it is given",
        differs="3, as `-v` logs; `--max-restarts 0` is torchrun's plain launch",
        trials=(
            Trial(
                args="train.py TORCHELASTIC_MAX_RESTARTS",
                env={"PET_VERBOSE": "1"},
                torchrun=Expected(says=("MAX_RESTARTS=0$",)),
                elaunch=Expected(says=("MAX_RESTARTS=3$", "max_restarts is 3")),
            ),
        ),
        proofs=(f"{_OPTIONS}::test_defaults_that_differ_from_torchruns_are_one_detail_and_no_note",),
    ),
)
