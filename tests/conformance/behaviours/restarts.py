"""27 to 38: failures, restarts, membership and signals."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from tests.conformance.behaviours.behaviour import Behaviour
from tests.conformance.behaviours.workers import JOIN, JOIN_WITH_SWITCH, MEETING, TWO
from tests.conformance.trial import MEET, RENDEZVOUS_LINES, Expected, Trial

_LIFE = "tests/e2e/test_life.py"
_SIGNALS = "tests/faults/test_signals.py"
_NODES = "tests/faults/test_nodes_failures.py"

# Rank 1 fails in the first round, and only there.
_FAILS_ONCE = f"""{MEET}
if not Path("failed").exists():
    meet()
    if RANK == 1:
        Path("failed").touch()
        sys.exit(3)
    time.sleep(600)
say("again")
"""
_FAILS = f"""{MEET}
say(f"restarts {{os.environ['TORCHELASTIC_RESTART_COUNT']}} of {{os.environ['TORCHELASTIC_MAX_RESTARTS']}}")
meet()
if RANK == 1:
    sys.exit(3)
time.sleep(600)
"""
RESTARTS = Trial(
    program=_FAILS,
    args="--nproc-per-node 2 --max-restarts 1 train.py",
    torchrun=Expected(
        code=1,
        says=("rank 1: restarts 0 of 1", "rank 1: restarts 1 of 1", r"exitcode +: 3 \(pid: \d+\)"),
        never=("restarts 2",),
    ),
)
# The first agent hosts the store: torchrun's others end when that agent does.
HOST_FIRST: Any = {
    "env": {**RENDEZVOUS_LINES, "PET_VERBOSE": "1"},
    "after": "hosts the TCP store|serves the job's store",
}
# The node of two workers spends the budget. The other one is healthy until that node's agent is gone.
_SPENT = f"""{MEET}
if os.environ["LOCAL_WORLD_SIZE"] == "2":
    # The agent, or elaunch's fork server, which ends with its agent.
    Path("agent").write_text(str(os.getppid()))
    meet()
    if os.environ["LOCAL_RANK"] == "0":
        sys.exit(3)
    time.sleep(600)
meet()
while Path(f"/proc/{{Path('agent').read_text()}}").exists():
    time.sleep(0.05)
# elaunch ends this one at the same time, perhaps a moment later.
time.sleep(5)
say("outlived the other agent")
sys.exit(4)
"""
_NO_BUDGET = f"{TWO} --max-restarts 0"
CLOSED = Trial(
    program=_SPENT,
    args=f"{_NO_BUDGET} --nproc-per-node 1 train.py",
    also=(f"{_NO_BUDGET} --nproc-per-node 2 train.py",),
    **HOST_FIRST,
    torchrun=Expected(code=1, says=("outlived the other agent",)),
    elaunch=Expected(code=1, never=("outlived the other agent",)),
)

_HANDLES = f"""{MEET}
def stop(signum, frame):
    say(f"got {{signum}}")
    sys.exit(0)

for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, stop)
subprocess.Popen(["sleep", "600"])
meet()
time.sleep(600)
"""


def _signalled(signum: signal.Signals, options: str = "") -> Trial:
    says = tuple(f"rank {rank}: got {signum.value}" for rank in (0, 1))
    return Trial(
        program=_HANDLES,
        args=f"--nproc-per-node 2 {options} train.py",
        send=signum,
        torchrun=Expected(code=1, says=(*says, "SignalException")),
        elaunch=Expected(code=128 + signum, says=says, never=("Traceback",)),
    )


def _unnamed(signum: signal.Signals) -> Trial:
    """A signal that torchrun does not know unless it is named."""
    trial = _signalled(signum)
    return replace(trial, torchrun=Expected(code=-signum, never=(f"got {signum.value}",), leftovers=True))


_IGNORES = f"""{MEET}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet()
time.sleep(600)
"""
GRACE = Trial(
    program=_IGNORES,
    args="--nproc-per-node 2 --shutdown-timeout 1 train.py",
    send=signal.SIGTERM,
    torchrun=Expected(code=1, seconds_max=25),
    elaunch=Expected(code=143, seconds_max=25),
)
_LEAVES = f"""{MEET}
say(f"leads its session: {{os.getsid(0) == os.getpid() == os.getpgid(0)}}")
subprocess.Popen(["sleep", "600"])
meet()
if RANK == 1:
    sys.exit(3)
time.sleep(600)
"""
# The node that is left goes on alone.
_GOES_ON = f"""{MEET}
def stop(signum, frame):
    Path("gone").touch()
    sys.exit(0)

if WORLD_SIZE == 1 and Path("gone").exists():
    say("alone now")
    sys.exit(0)
if WORLD_SIZE == 1:
    time.sleep(600)
signal.signal(signal.SIGTERM, stop)
meet()
wait_for_file("gone")
sys.exit(3)
"""
_GOES_ON_ARGS = (
    f"{MEETING.format(nodes='1:2')} --max-restarts 1"
    # Both must be there for the first round. To import torch takes a busy host many seconds.
    " --rdzv-conf last_call_timeout=40,keep_alive_interval=1,join_timeout=90 train.py"
)

BEHAVIOURS = (
    Behaviour(
        number=27,
        fact="If a worker fails, all workers on all nodes restart, `--max-restarts` times; then the exit code is 1",
        differs="the budget is the job's, where each agent of torchrun has its own; a failure that is certain to repeat"
        " ends the job immediately",
        trials=(
            RESTARTS,
            Trial(
                program=_FAILS_ONCE,
                args=f"{TWO} --max-restarts 1 train.py",
                also=(f"{TWO} --max-restarts 1 train.py",),
                torchrun=Expected(says=("rank 0: again", "rank 1: again")),
            ),
        ),
        proofs=(
            f"{_LIFE}::test_all_ranks_come_back_as_new_processes_and_reduce_again",
            "tests/e2e/test_corpus.py::test_the_report_names_the_cause_and_the_next_step_and_nothing_else",
            f"{_NODES}::test_a_worker_killed_on_one_node_restarts_the_workers_of_all",
        ),
    ),
    Behaviour(
        number=28,
        fact="If all workers on all nodes exit with 0, the exit code is 0",
        trials=(
            Trial(
                args=f"{TWO} train.py",
                also=(f"{TWO} train.py",),
                torchrun=Expected(says=("rank 0:", "rank 1:")),
            ),
        ),
        proofs=(f"{_NODES}::test_a_job_that_has_recovered_ends_well_on_all_nodes_and_leaves_nothing",),
    ),
    Behaviour(
        number=29,
        fact="A worker killed by a signal appears in the summary as `exitcode  : -9 (pid: …)`, and the exit code is 1",
        trials=(
            Trial(
                program="import os\nos.kill(os.getpid(), 9)\n",
                args="--max-restarts 0 train.py",
                torchrun=Expected(code=1, says=(r"exitcode +: -9 \(pid: \d+\)", "SIGKILL")),
            ),
        ),
        proofs=("tests/unit/launcher/test_report.py::test_a_signal_is_named_beside_the_exit_code",),
    ),
    Behaviour(
        number=30,
        fact="After a failure no agent waits for the others",
        differs="the other nodes end too. torchrun's healthy node runs on until its own workers fail",
        trials=(CLOSED,),
        proofs=(f"{_NODES}::test_a_failure_with_no_restart_left_ends_all_agents_with_the_same_first_failure",),
    ),
    Behaviour(
        number=31,
        fact="A change of membership gives a new `WORLD_SIZE` and perhaps another `RANK`, and costs no restart",
        differs="a node that joins does not end the job (see 6)",
        trials=(JOIN, JOIN_WITH_SWITCH),
        proofs=("tests/unit/rendezvous/rules/test_form_generation_budget.py::test_who_joins_is_not_charged",),
    ),
    Behaviour(
        number=32,
        fact="`TORCHELASTIC_RESTART_COUNT` counts the restarts, and `TORCHELASTIC_MAX_RESTARTS` stays",
        differs="the count is the same on all nodes; torchrun's is each agent's own",
        trials=(RESTARTS,),
        proofs=("tests/unit/agent/test_environment.py::test_a_worker_gets_torchruns_variables_and_its_generation",),
    ),
    Behaviour(
        number=33,
        fact="A handled signal goes to each worker's process group, SIGKILL follows after the grace, and the exit code"
        " is not 0",
        differs="the exit code is 128 plus the signal's number, without a traceback; torchrun's is 1. At first the"
        " worker alone gets the signal: its data loaders continue while it saves",
        trials=(_signalled(signal.SIGTERM), GRACE),
        proofs=(
            f"{_SIGNALS}::test_workers_get_the_signal_and_their_exit_0_does_not_hide_it",
            f"{_SIGNALS}::test_a_worker_that_ignores_sigterm_is_killed_after_the_grace",
        ),
    ),
    Behaviour(
        number=34,
        fact="`--signals-to-handle` lists the signals that stop the job",
        differs="SIGUSR1 and SIGUSR2 are on the list unless you name others; torchrun exits on them and leaves its"
        " workers behind. An unknown name is a usage error; torchrun warns and continues without it",
        trials=(
            _signalled(signal.SIGUSR1, "--signals-to-handle SIGTERM,SIGUSR1"),
            _unnamed(signal.SIGUSR1),
            _unnamed(signal.SIGUSR2),
            Trial(
                args="--signals-to-handle SIGTERM,SIGNOPE train.py",
                torchrun=Expected(says=("rank 0:", "SIGNOPE")),
                elaunch=Expected(code=2, says=("names SIGNOPE, not a signal",)),
            ),
        ),
    ),
    Behaviour(
        number=35,
        fact="A signal to one agent does not end the job of the others",
        differs="they continue immediately; those of torchrun only when their workers fail",
        trials=(
            Trial(
                program=_GOES_ON,
                args=_GOES_ON_ARGS,
                also=(_GOES_ON_ARGS,),
                **HOST_FIRST,
                send=signal.SIGTERM,
                to=1,
                torchrun=Expected(codes=(0, 1), says=("alone now",)),
                elaunch=Expected(codes=(0, 143), says=("alone now",)),
            ),
        ),
        proofs=(f"{_NODES}::test_sigterm_to_one_agent_is_published_and_the_others_resume_immediately",),
    ),
    Behaviour(
        number=36,
        fact="An agent whose job has failed closes the rendezvous",
        differs="the others get the first failure and report it; torchrun's get nothing until the next rendezvous",
        trials=(CLOSED,),
        proofs=(f"{_NODES}::test_a_failure_with_no_restart_left_ends_all_agents_with_the_same_first_failure",),
    ),
    Behaviour(
        number=37,
        fact="A worker leads a session and a process group, and its children end with the group",
        differs="also the children of a worker that crashed, which torchrun leaves behind",
        trials=(
            Trial(
                program=_LEAVES,
                args="--nproc-per-node 2 --max-restarts 0 train.py",
                torchrun=Expected(code=1, says=("rank 0: leads its session: True",), leftovers=True),
                elaunch=Expected(code=1, says=("rank 0: leads its session: True",)),
            ),
        ),
        proofs=(
            "tests/faults/test_restarts_leave_nothing.py"
            "::test_ten_restarts_leave_no_process_no_descriptor_no_thread_no_file",
            "tests/faults/test_kill_agent.py::test_children_of_workers_die_with_the_agent",
        ),
    ),
    Behaviour(
        number=38,
        fact="No process is left after SIGTERM, SIGINT, SIGHUP or SIGQUIT",
        differs="nor after SIGKILL of the agent, where torchrun leaves the workers",
        trials=(
            _signalled(signal.SIGINT),
            _signalled(signal.SIGHUP),
            _signalled(signal.SIGQUIT),
        ),
        proofs=(
            f"{_SIGNALS}::test_sigterm_to_all_processes_at_once_is_a_stop_and_no_failure",
            f"{_SIGNALS}::test_ctrl_c_on_a_terminal_interrupts_every_worker_once",
        ),
    ),
)
