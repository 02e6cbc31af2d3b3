"""47 to 50 and 52: settings of the rendezvous, spares, NUMA, the grace, and plug-ins."""

from __future__ import annotations

from tests.conformance.behaviours.behaviour import Behaviour
from tests.conformance.behaviours.restarts import GRACE
from tests.conformance.behaviours.workers import MEETING, TWO
from tests.conformance.trial import MEET, RENDEZVOUS_LINES, Expected, Trial

_STORE = "tests/unit/launcher/store/test_locate.py"
_OPTIONS = "tests/unit/launcher/options/test_options.py"

_SETTINGS = (
    "join_timeout=60,last_call_timeout=1,close_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3,"
    "read_timeout=30,is_host=1,store_type=tcp"
)
_UNTIL_SPARE = f"""{MEET}
meet()
wait_for_file("spare-is-there")
"""
# Rank 0 fails while rank 1 ignores SIGTERM.
_STUBBORN = f"""{MEET}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not Path("failed").exists():
    meet()
    if RANK == 0:
        Path("failed").touch()
        sys.exit(3)
    time.sleep(600)
say("again")
"""
_LATE = f"{TWO} train.py"

BEHAVIOURS = (
    Behaviour(
        number=47,
        fact="`--rdzv-conf` takes the settings of torchrun's backends",
        differs="quotes that no shell has stripped are removed, where torchrun loses the setting; an unknown setting"
        " is refused, where torchrun ignores it ([settings](options.md#settings-of-the-rendezvous))",
        trials=(
            Trial(
                args=f"{MEETING.format(nodes='1:2')} --rdzv-conf {_SETTINGS} train.py GROUP_WORLD_SIZE",
                torchrun=Expected(says=("GROUP_WORLD_SIZE=1",)),
            ),
            # With the first key torchrun reads `'last_call_timeout`, and waits 30 s.
            Trial(
                args=f"{MEETING.format(nodes='1:2')} --rdzv-conf \"'last_call_timeout=1,timeout=60'\" train.py",
                torchrun=Expected(says=("rank 0:",), seconds_min=25),
                elaunch=Expected(says=("rank 0:",)),
            ),
            Trial(
                args=f"{TWO} --rdzv-conf last_call_timout=1 train.py",
                also=(f"{TWO} --rdzv-conf last_call_timout=1 train.py",),
                torchrun=Expected(says=("rank 1:",)),
                elaunch=Expected(code=2, says=("did you mean last_call_timeout",)),
            ),
        ),
        proofs=(
            f"{_STORE}::test_every_setting_of_torchs_backends_is_known",
            f"{_STORE}::test_settings_whose_quotes_no_shell_has_taken_off_are_read",
            f"{_STORE}::test_a_wrong_setting_is_one_sentence",
        ),
    ),
    Behaviour(
        number=48,
        fact="A node beyond the largest number waits as a spare",
        differs="it takes a lost node's place, and its exit code is the job's; torchrun's spare ends with 1",
        trials=(
            Trial(
                program=_UNTIL_SPARE,
                args=_LATE,
                also=(_LATE, _LATE),
                after="all ready",
                env=RENDEZVOUS_LINES,
                when="redundancy list|waiting as a spare",
                touch="spare-is-there",
                torchrun=Expected(codes=(0, 0, 1)),
                elaunch=Expected(),
            ),
        ),
        proofs=("tests/faults/test_nodes_membership.py::test_a_spare_takes_the_seat_of_a_lost_node",),
    ),
    Behaviour(
        number=49,
        fact="`--numa-binding` is node, socket, exclusive or core-complex",
        differs="needs no `numactl`, and hosts without GPUs are bound too",
        trials=(Trial(args="--numa-binding carrots train.py", torchrun=Expected(code=2, never=("rank 0",))),),
        proofs=(
            "tests/unit/agent/workers/test_topology.py::test_node_is_all_cpus_of_the_gpus_node",
            "tests/unit/agent/workers/test_topology.py::test_this_host_can_be_read_and_bound_to",
        ),
    ),
    Behaviour(
        number=50,
        fact="`--shutdown-timeout` or `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` is the time from SIGTERM to SIGKILL; 0 is"
        " allowed, less is not",
        differs="also fractions of a second. A failure gives siblings `--failure-grace` (0.5 s), or this time while"
        " they save; torchrun gives them 30 s whatever is typed. A negative value has exit code 2",
        trials=(
            GRACE,
            Trial(
                args="--shutdown-timeout -1 train.py",
                torchrun=Expected(code=1, says=("ValueError",)),
                elaunch=Expected(code=2, says=("is not a number of seconds; give 0 or more",)),
            ),
            Trial(
                program=_STUBBORN,
                args="--nproc-per-node 2 --max-restarts 1 --shutdown-timeout 1 train.py",
                torchrun=Expected(says=("rank 1: again",), seconds_min=25),
                elaunch=Expected(says=("rank 1: again",), seconds_max=25),
            ),
        ),
        proofs=(f"{_OPTIONS}::test_the_shutdown_timeout_comes_from_the_option_its_variables_or_is_30_s",),
    ),
    Behaviour(
        number=52,
        fact="Plug-ins add rendezvous backends (`torchrun.handlers`) and log specs (`torchrun.logs_specs`)",
        differs="not supported: a backend's class would bring torch's agent with it. `--logs-specs` is accepted without"
        " effect, and `-v` logs that; an unknown backend is a usage error",
        trials=(
            Trial(
                args="--logs-specs nothing-of-this-name train.py",
                env={"PET_VERBOSE": "1"},
                torchrun=Expected(code=1, says=("ValueError",)),
                elaunch=Expected(says=(r"without effect here: --logs-specs \(there are no log plug-ins\)", "rank 0:")),
            ),
        ),
        proofs=(f"{_OPTIONS}::test_options_without_effect_are_one_detail",),
    ),
)
