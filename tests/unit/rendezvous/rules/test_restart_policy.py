"""rendezvous.rules.restart_policy: why a generation failed, and whether another one is worth starting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from elaunch.rendezvous.rules.restart_policy import (
    NO_PROGRESS_MAX,
    GiveUp,
    Restart,
    alike,
    decisive_failure,
    first_failure,
    identical,
    judge,
    killed_together,
)
from elaunch.rendezvous.types import Failure, FailureKind, Terms

TERMS = Terms(max_restarts=3)
RAISED = Failure(
    FailureKind.EXCEPTION,
    generation=1,
    node_id="a",
    host="a",
    rank=0,
    local_rank=0,
    pid=100,
    code=1,
    message="raised ValueError: bad batch 17 at 0x7f00",
    exception="ValueError",
    frame="train.py:3 in f",
    progressed=False,
)
KILLED = replace(RAISED, kind=FailureKind.SIGNAL, code=-9, message="was killed by SIGKILL", exception="", frame="")
EARLY = replace(
    RAISED,
    kind=FailureKind.ENDED_EARLY,
    rank=1,
    code=0,
    message="ended with exit code 0 at 12:00:00",
    exception="",
    frame="",
    progressed=True,
)
CRASH = replace(KILLED, code=-11, message="was killed by SIGSEGV", frame="train.py:2 in f", lived_s=3)
PARENT = replace(KILLED, kind=FailureKind.TEMPLATE_LOST, message="the fork server was killed by SIGKILL on a")
PEER = replace(RAISED, kind=FailureKind.PEER_LOST, message="raised RuntimeError: Connection closed by peer", rank=3)


def decide(
    failures: Mapping[int, Sequence[Failure]],
    *,
    terms: Terms = TERMS,
    spent: int | None = 0,
    no_progress: int = 0,
    progressed: bool = False,
) -> Restart | GiveUp:
    return judge(terms, failures, max(failures), spent, no_progress, progressed)


def test_ranks_that_one_signal_ended_are_named_with_the_first() -> None:
    also = [replace(KILLED, rank=rank) for rank in (3, 2)]

    assert killed_together(KILLED, [KILLED, RAISED]).message == "was killed by SIGKILL"
    assert killed_together(KILLED, [KILLED, also[0]]).message == "was killed by SIGKILL, and so was rank 3,"
    assert killed_together(KILLED, [KILLED, *also]).message == "was killed by SIGKILL, and so were ranks 2 and 3,"
    assert killed_together(RAISED, [RAISED, replace(RAISED, rank=2)]) is RAISED


@pytest.mark.parametrize(
    ("one", "other", "is_pointless"),
    [
        (CRASH, replace(CRASH, rank=2, lived_s=4, message="was killed by SIGSEGV, and so was rank 0,"), True),
        (CRASH, replace(CRASH, frame="train.py:9 in g"), False),
        (replace(CRASH, progressed=True, lived_s=900), replace(CRASH, progressed=True, lived_s=500), False),
        (replace(CRASH, progressed=True, step=4), replace(CRASH, progressed=True, step=4), True),
        (replace(CRASH, code=-9), replace(CRASH, code=-9), False),
        (PARENT, PARENT, True),
        (PARENT, replace(PARENT, message="the fork server was killed by SIGKILL on b"), False),
        (replace(PARENT, progressed=True, lived_s=900), replace(PARENT, progressed=True, lived_s=500), False),
        (replace(CRASH, code=-6), replace(CRASH, code=-6), False),
        (
            replace(RAISED, exception="FileExistsError", message="raised FileExistsError: 'runs'", progressed=True),
            replace(RAISED, exception="FileExistsError", message="raised FileExistsError: 'runs'", progressed=True),
            True,
        ),
    ],
)
def test_a_crash_a_killed_parent_and_what_exists_already_are_not_tried_a_third_time(
    one: Failure, other: Failure, is_pointless: bool
) -> None:
    assert isinstance(decide({1: [one], 2: [replace(other, generation=2)]}), GiveUp) is is_pointless


def test_a_failure_is_worth_a_restart_while_the_budget_lasts() -> None:
    *worth, spent = [decide({1: [KILLED]}, spent=spent) for spent in range(4)]

    assert worth == [Restart("restart 1 of 3"), Restart("restart 2 of 3"), Restart("restart 3 of 3, the last one")]
    assert spent == GiveUp("the budget of 3 restarts is spent")
    windowed = decide({1: [KILLED]}, terms=replace(TERMS, restart_window_s=60.0), spent=3)
    assert windowed == GiveUp("the budget of 3 restarts within 60 s is spent")


def test_an_exit_code_in_no_restart_codes_ends_the_job_with_that_code_on_whichever_rank() -> None:
    terms = replace(TERMS, no_restart_codes=(93, 94))
    final = replace(RAISED, kind=FailureKind.EXIT_CODE, code=94, exception="", frame="", progressed=True, rank=2)
    gave_up = GiveUp("exit code 94 is in --no-restart-codes, so the job ends with it", 94)

    assert decide({1: [final]}, terms=terms) == gave_up
    assert decide({1: [KILLED, PEER, final]}, terms=replace(terms, max_restarts=0), spent=None) == gave_up
    assert decide({1: [replace(final, kind=FailureKind.STARTUP)]}, terms=terms) == gave_up
    assert isinstance(decide({1: [final]}), Restart)
    assert isinstance(decide({1: [replace(PEER, code=94)]}, terms=terms), Restart)


def test_what_the_budget_is_not_charged_for_is_worth_another_try_when_it_is_spent() -> None:
    assert isinstance(decide({1: [KILLED]}, spent=None), Restart)
    assert isinstance(decide({1: [KILLED]}, spent=None, no_progress=NO_PROGRESS_MAX), Restart)


@pytest.mark.parametrize("kind", [FailureKind.STARTUP, FailureKind.DEBUGGER])
def test_what_would_end_the_same_way_is_not_tried_again_though_it_is_not_charged(kind: FailureKind) -> None:
    assert isinstance(decide({1: [replace(RAISED, kind=kind)]}, spent=None), GiveUp)


def test_the_same_error_twice_without_progress_is_not_tried_a_third_time() -> None:
    again = replace(RAISED, generation=2, rank=1, pid=200, message="raised ValueError: bad batch 18 at 0x7fff")

    decision = decide({1: [RAISED], 2: [again]})

    assert isinstance(decision, GiveUp)
    assert "the same way twice" in decision.reason


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("ConnectionError", "HTTPSConnectionPool(host='hub', port=443): Max retries exceeded with url: /x"),
        ("RuntimeError", "429 Client Error: Too Many Requests for url: https://hub/x"),
        ("TimeoutError", "The read operation timed out"),
        ("socket.gaierror", "[Errno -3] Temporary failure in name resolution"),
        ("OSError", "[Errno 116] Stale file handle: '/data/x'"),
        ("ssl.SSLEOFError", "EOF occurred in violation of protocol (_ssl.c:1016)"),
    ],
)
def test_an_error_of_a_busy_service_or_a_network_is_retried_also_before_any_progress(
    exception: str, message: str
) -> None:
    failure = replace(RAISED, exception=exception, message=f"raised {exception}: {message}", ranks_alike=2)
    decision = judge(TERMS, {1: [failure], 2: [failure]}, 2, 0, 1, False, world_size=2)

    assert isinstance(decision, Restart)


@pytest.mark.parametrize(
    ("line", "kind"),
    [("ERROR: no config", GiveUp), ("ERROR: no shard", Restart), ("S3: SlowDown, reduce your rate", Restart)],
)
def test_an_exit_before_any_progress_is_the_same_one_by_its_last_line(
    line: str, kind: type[Restart] | type[GiveUp]
) -> None:
    exited = replace(RAISED, kind=FailureKind.EXIT_CODE, exception="", frame="", message="exited with code 1")
    one = replace(exited, tail=line.replace("shard", "config"))

    assert isinstance(decide({1: [one], 2: [replace(exited, tail=line)]}), kind)


STEP_7 = replace(RAISED, progressed=True, step=7, lived_s=90.0)
NO_STEP = replace(RAISED, progressed=True, lived_s=100.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (STEP_7, replace(STEP_7, step=9)),
        (STEP_7, replace(STEP_7, step=-1)),
        (NO_STEP, replace(NO_STEP, lived_s=115.0)),
        (NO_STEP, replace(NO_STEP, message="raised ValueError: bad batch 18 at 0x7f00")),
    ],
    ids=["another step", "unknown step", "much longer", "another number"],
)
def test_the_same_error_after_progress_is_tried_again(one: Failure, other: Failure) -> None:
    assert identical(one, other)
    assert isinstance(decide({1: [one], 2: [other]}), Restart)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (STEP_7, replace(STEP_7, lived_s=4.0), "in the same step, after step 7"),
        (STEP_7, replace(STEP_7, message="raised ValueError: bad batch 18 at 0x7fff"), "in the same step"),
        (NO_STEP, replace(NO_STEP, lived_s=92.0), "after about the same time"),
        (replace(NO_STEP, lived_s=0.5), replace(NO_STEP, lived_s=2.4), "after about the same time"),
        (STEP_7, replace(STEP_7, rank=1, node_id="b", host="b"), "in the same step, after step 7"),
        (NO_STEP, replace(NO_STEP, rank=1, node_id="b", host="b"), "after about the same time"),
    ],
    ids=["step", "step, other numbers", "time", "short time", "step, another rank", "time, another rank"],
)
def test_the_same_bug_in_the_same_step_is_not_tried_a_third_time(one: Failure, other: Failure, text: str) -> None:
    decision = decide({1: [one], 2: [other]})

    assert isinstance(decision, GiveUp)
    assert text in decision.reason


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("OSError", "[Errno 5] Input/output error"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("requests.exceptions.ConnectionError", "no route to host"),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."),
        ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:94"),
    ],
)
def test_what_its_surroundings_may_have_caused_is_tried_again_also_in_the_same_step(
    exception: str, message: str
) -> None:
    failure = replace(STEP_7, exception=exception, message=f"raised {exception}: {message}")

    assert isinstance(decide({1: [failure], 2: [failure]}), Restart)


def test_a_rank_that_ended_before_the_others_is_the_peer_that_they_lost() -> None:
    first, later = replace(PEER, call="all_reduce"), replace(PEER, rank=0, call="all_reduce")

    cause = decisive_failure([first, EARLY, later])

    assert cause.rank == EARLY.rank
    assert cause.message == "ended with exit code 0 at 12:00:00, while ranks 0 and 3 waited in all_reduce,"
    assert decisive_failure([cause, first, later]) == cause
    assert alike(EARLY, cause), "a report that has both shows one"


def test_where_the_others_waited_is_left_out_if_they_waited_in_different_calls() -> None:
    cause = decisive_failure([replace(PEER, call="all_reduce"), replace(PEER, rank=0, call="barrier"), EARLY])

    assert cause.message == "ended with exit code 0 at 12:00:00, while ranks 0 and 3 waited for it,"


def test_a_rank_that_ended_well_explains_no_store_without_a_server() -> None:
    text = "raised DistNetworkError: The client socket has timed out after 15000ms while trying to connect to (a, 29)"
    no_store = replace(PEER, message=text)

    assert decisive_failure([EARLY, no_store]) is no_store
    assert decisive_failure([no_store, PEER, EARLY]).kind is FailureKind.ENDED_EARLY


def test_a_rank_that_ends_early_twice_is_not_waited_for_a_third_time() -> None:
    late = replace(EARLY, lived_s=20.0)

    assert isinstance(decide({1: [PEER, EARLY], 2: [replace(EARLY, lived_s=1.0), PEER]}), GiveUp)
    assert isinstance(decide({1: [PEER, EARLY], 2: [PEER, late]}), Restart)
    assert isinstance(decide({1: [PEER, EARLY], 2: [PEER, replace(EARLY, rank=2)]}), Restart), "another rank"


@pytest.mark.parametrize(("no_progress", "kind"), [(0, Restart), (2, GiveUp)])
def test_where_the_ranks_own_progress_is_unknown_its_generations_decides(
    no_progress: int, kind: type[Restart] | type[GiveUp]
) -> None:
    again = replace(RAISED, generation=2, progressed=None, lived_s=60.0)

    assert isinstance(decide({1: [RAISED], 2: [again]}, no_progress=no_progress), kind)


@pytest.mark.parametrize(
    "other",
    [
        replace(RAISED, exception="KeyError"),
        replace(RAISED, frame="train.py:4 in f"),
        replace(RAISED, message="raised ValueError: bad word"),
        replace(RAISED, code=2),
        replace(RAISED, kind=FailureKind.EXIT_CODE),
    ],
    ids=["type", "place", "message", "code", "kind"],
)
def test_another_error_is_not_the_same_one(other: Failure) -> None:
    assert not identical(RAISED, other)
    assert isinstance(decide({1: [RAISED], 2: [other]}), Restart)


def test_an_exception_before_the_end_by_a_signal_is_the_same_error_too() -> None:
    printed = replace(RAISED, code=-9, message="printed ValueError: bad batch 17 just before it was killed by SIGKILL")

    assert isinstance(decide({1: [printed], 2: [printed]}), GiveUp)


def test_a_debugger_that_was_left_is_not_started_again_however_far_the_job_was() -> None:
    left = replace(RAISED, kind=FailureKind.DEBUGGER, progressed=True)

    decision = decide({1: [PEER, left]}, progressed=True)

    assert isinstance(decision, GiveUp)
    assert "debugger was quit" in decision.reason
    assert "at a terminal" in decision.reason


def test_a_program_that_refuses_is_not_started_again_however_far_the_job_was() -> None:
    refused = replace(RAISED, kind=FailureKind.REFUSED, progressed=True)

    decision = decide({1: [PEER, refused]}, progressed=True)

    assert decision == GiveUp("the program reported that another try would end the same way")


_ENDS = (FailureKind.DEBUGGER, FailureKind.REFUSED)
FROM_OUTSIDE = [kind for kind in FailureKind if not kind.counts_as_identical and kind not in _ENDS]


@pytest.mark.parametrize("kind", FROM_OUTSIDE)
def test_what_came_from_outside_never_counts_as_the_same_twice(kind: FailureKind) -> None:
    failure = replace(RAISED, kind=kind)

    assert not identical(failure, failure)
    assert isinstance(decide({1: [failure], 2: [failure]}, progressed=True), Restart)


def test_the_gpus_memory_may_run_out_in_the_same_way_but_the_kernels_kill_never_counts() -> None:
    raised = replace(RAISED, kind=FailureKind.OUT_OF_MEMORY)
    unknown = replace(raised, code=None)

    assert identical(raised, raised)
    for killed in (replace(raised, code=-9), unknown):
        assert not identical(killed, killed)


def test_verdicts_are_compared_not_the_lost_peers_that_were_recorded_first() -> None:
    decision = decide({1: [PEER, RAISED], 2: [replace(PEER, message="broken pipe"), RAISED]})

    assert isinstance(decision, GiveUp)


def test_the_jobs_first_failure_is_no_lost_peer_if_anything_else_failed() -> None:
    first = replace(RAISED, generation=2)

    assert first_failure({1: [PEER], 2: [PEER, first], 3: [KILLED]}) == first
    assert first_failure({1: [PEER], 2: [PEER]}) is PEER
    assert first_failure({}) is None


LEFT = replace(RAISED, kind=FailureKind.EXIT_CODE, code=7, message="exited with code 7", exception="", frame="")


def test_an_exit_code_names_who_waited_and_is_the_same_without() -> None:
    named = decisive_failure([replace(PEER, call="all_reduce"), LEFT])

    assert named.message == "exited with code 7, while rank 3 waited in all_reduce,"
    both = decisive_failure([named, replace(PEER, rank=5, call="all_reduce")])
    assert both.message == "exited with code 7, while ranks 3 and 5 waited in all_reduce,"
    assert identical(named, replace(LEFT, generation=2))
    temporary = replace(LEFT, code=75)
    assert not identical(temporary, temporary), "EX_TEMPFAIL is to be retried"


def test_ranks_of_which_nothing_is_known_may_have_waited_too() -> None:
    lost = [replace(PEER, call="all_reduce"), replace(PEER, rank=5, call="all_reduce")]

    all_three, of_five = (decisive_failure([replace(LEFT, world_size=size), *lost]) for size in (3, 5))

    assert all_three.message == "exited with code 7, while ranks 3 and 5 waited in all_reduce,"
    assert of_five.message == "exited with code 7, while ranks 3 and 5 waited in all_reduce (perhaps others too),"
    assert identical(all_three, of_five)


@pytest.mark.parametrize(
    ("failures", "world_size", "is_pointless"),
    [
        ([replace(RAISED, ranks_alike=3), replace(RAISED, node_id="b", ranks_alike=2)], 5, True),
        ([replace(RAISED, ranks_alike=3)], 4, False),
        ([RAISED], 1, False),
        ([replace(RAISED, ranks_alike=2, step=0)], 2, False),
        ([replace(RAISED, ranks_alike=2, lived_s=900)], 2, False),
        ([replace(RAISED, ranks_alike=2, exception="ConnectionError")], 2, False),
        ([replace(RAISED, ranks_alike=2), replace(RAISED, node_id="b", frame="train.py:9 in g")], 3, False),
    ],
)
def test_a_bug_of_all_ranks_before_their_first_step_is_not_tried_again(
    failures: list[Failure], world_size: int, is_pointless: bool
) -> None:
    decision = judge(TERMS, {0: failures}, 0, 0, 0, False, world_size=world_size)

    assert isinstance(decision, GiveUp if is_pointless else Restart)


def test_a_bug_of_all_ranks_is_tried_again_where_the_next_try_is_on_another_node() -> None:
    failures = {0: [replace(RAISED, ranks_alike=2)]}

    assert isinstance(judge(TERMS, failures, 0, 0, 0, False, is_elsewhere=True, world_size=2), Restart)


def test_of_ranks_that_sigkill_ended_the_one_that_printed_an_exception_is_the_cause() -> None:
    killed = [replace(KILLED, rank=rank) for rank in range(3)]
    raised = replace(killed[1], tail="Traceback (most recent call last):\nValueError: bad batch 17")

    assert decisive_failure([killed[0], killed[2], raised]) is raised
    assert decisive_failure(killed) is killed[0]
    assert decisive_failure([replace(killed[0], code=-11), raised]).code == -11
