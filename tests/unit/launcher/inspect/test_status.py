"""inspect.status and .top: what is known of a job as one object, and the object as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from elaunch.launcher.inspect.job_source import Gathered
from elaunch.launcher.inspect.status import RANKS_SHOWN, status_record, text_of
from elaunch.launcher.inspect.top import screen
from elaunch.rendezvous.rules.reports import JobReport, JobState, NodeReport, RankReport, SeatReport
from elaunch.rendezvous.types import Failure, FailureKind, Generation, OpenKind, Outcome, OutcomeKind, Terms
from tests.harness import REPOSITORY

NOW = 1_800_000_000.0
FAILURE = Failure(
    FailureKind.EXCEPTION, 0, "node-b-00000002", "node-b", 3, 1, 4711, 1, "raised ValueError: loss is nan",
    "ValueError", "/home/me/train.py:41 in step", failed_at=NOW - 125, advice="lower the learning rate",
)  # fmt: skip
JOB = JobReport(
    "night",
    JobState.RUNNING,
    True,
    Terms(2, 2, 3, None, "train.py --lr 0.1"),
    Generation(1, OpenKind.FAIL, FAILURE.sentence, "node-b-00000002"),
    (SeatReport("node-a-00000001", "node-a", 0, 2, True), SeatReport("node-b-00000002", "node-b", 2, 2, True)),
    ("node-c-00000003",),
    "node-a-00000001",
    1,
    failure=FAILURE,
)


FIRST = Generation(0, OpenKind.START, "the job starts")


def node(number: int, host: str, ranks: range, step: int = 1200, **changes: object) -> NodeReport:
    reports = tuple(
        RankReport(rank, local, 100 + rank, "running", step + local, "", 0.21, 0.4, 3 << 28)
        for local, rank in enumerate(ranks)
    )
    memory = {"memory_bytes": 64 << 30, "memory_free_bytes": 40 << 30, "cpus": 8, "load": 2.04}
    made = NodeReport(f"{host}-{number:08}", host, 99, "running", 300.0, 1, 123.0, ranks=reports, **memory)
    return replace(made, **changes)  # type: ignore[arg-type]


def known(**changes: object) -> Gathered:
    """Two nodes and a spare, of which the second node does not answer."""
    nodes = {"node-a-00000001": node(1, "node-a", range(2))}
    spare = NodeReport("node-c-00000003", "node-c", 98, "waiting", 20.0)
    silent = {"node-b-00000002": "did not answer within 3 s; its lease still holds"}
    return replace(Gathered(JOB, {**nodes, "node-c-00000003": spare}, silent), **changes)  # type: ignore[arg-type]


def test_the_text_has_the_job_its_ranks_its_failure_and_who_did_not_answer() -> None:
    assert (
        text_of(status_record(known(), NOW))
        == """\
job night: running, generation 1 for 2 min 3 s
  command   train.py --lr 0.1
  size      2 nodes, 4 ranks, 1 spare
  step      1200 to 1201, 210 ms per step
  restarts  2 of 3 restarts left
  failure   2 min 5 s ago: rank 3 (local rank 1 on node-b, pid 4711) raised ValueError: loss is nan in generation 0
            at /home/me/train.py:41 in step
            lower the learning rate

rank   host    pid  state      step  step time  last report  memory
0      node-a  100  running    1200  210 ms     0 s ago      768 MiB
1      node-a  101  running    1201  210 ms     0 s ago      768 MiB
2–3    node-b       no answer
spare  node-c       waiting
node-b did not answer within 3 s; its lease still holds
"""
    )


def test_a_large_job_is_shown_by_node_unless_each_rank_is_requested() -> None:
    seats = tuple(SeatReport(f"n{i}-{i:08}", f"n{i}", 8 * i, 8, True) for i in range(8))
    nodes = {f"n{i}-{i:08}": node(i, f"n{i}", range(8 * i, 8 * i + 8), 100 + i, topology=f"r{i}") for i in range(8)}
    record = status_record(Gathered(replace(JOB, seats=seats, others=()), nodes, {}), NOW)

    by_node, by_rank = text_of(record), text_of(record, every_rank=True)

    assert len(record["ranks"]) > RANKS_SHOWN
    assert re.search(r"^8–15 +n1 +running +101–108 +210 ms +0 s ago +6 GiB +40 GiB +2.0 +r1$", by_node, re.MULTILINE)
    assert by_node.endswith("--ranks shows each rank\n")
    assert len(re.findall(r"^\d+ +n\d ", by_rank, re.MULTILINE)) == 64
    # A screen has as many lines as fit, and counts the others.
    lines = screen(record, "the store is unreachable", 24, every_rank=True).splitlines()
    assert len(lines) == 24
    assert re.match(r"… \d+ more lines$", lines[-4])
    assert lines[-2] == "no answer: the store is unreachable"


def test_a_job_that_ended_or_forms_is_shown_so() -> None:
    outcome = Outcome(OutcomeKind.FAILED, "the budget is spent", 1, 3, 3)
    ended = status_record(Gathered(replace(JOB, state=JobState.ENDED, ended=outcome), {}, {}), NOW)
    waits = NodeReport("node-a-00000001", "node-a", 9, "waiting", 4.0, waiting="nodes: 1 of 2 is here")
    forms = replace(JOB, state=JobState.FORMING, generation=FIRST, seats=(), failure=None, others=("node-a-00000001",))
    forming = status_record(Gathered(forms, {"node-a-00000001": waits}, {}), NOW)

    assert text_of(ended).startswith("job night: ended: failed, generation 1\n")
    assert "the budget is spent; exit code 1" in text_of(ended)
    assert "job night: forming, generation 0\n" in text_of(forming)
    assert "1 of 2 nodes" in text_of(forming)
    assert "node-a for nodes: 1 of 2 is here" in text_of(forming)
    assert "spare" not in text_of(forming)
    assert forming["spares"] == 0


def test_a_generation_that_is_being_stopped_is_not_reported_as_forming() -> None:
    forms = replace(JOB, state=JobState.FORMING)
    stops = {"node-a-00000001": node(1, "node-a", range(2), generation=0, state="stopping")}

    for job in (forms, replace(JOB, generation=replace(FIRST, number=0))):
        record = status_record(Gathered(job, stops, {}), NOW)
        assert (record["state"], record["workers_generation"], record["since_s"]) == ("stopping", 0, None)
        assert text_of(record).startswith("job night: stopping generation 0\n")

    runs = {**stops, "node-b-00000002": node(2, "node-b", range(2, 4))}
    assert status_record(Gathered(JOB, runs, {}), NOW)["state"] == "running", "one node is only a moment ahead"
    waits = {"node-a-00000001": node(1, "node-a", range(2), generation=0, state="waiting")}
    record = status_record(Gathered(forms, waits, {}), NOW)
    assert text_of(record).startswith("job night: forming, generation 1\n"), "it has not begun, so it has no age"


def test_a_lost_node_is_lost_and_one_that_left_has_left() -> None:
    left_a_seat = (JOB.seats[0], replace(JOB.seats[1], is_member=False))
    for kind, state in ((OpenKind.LOSS, "lost"), (OpenKind.LEAVE, "left")):
        opened = Generation(2, kind, "…", "node-b-00000002")
        job = replace(JOB, state=JobState.FORMING, generation=opened, seats=left_a_seat)

        record = status_record(known(job=job, silent={}), NOW)

        assert [entry["state"] for entry in record["nodes"]] == ["running", state, "waiting"]
        assert "  size      2 nodes, 4 ranks, 1 spare; 1 node lost or left\n" in text_of(record)
        assert re.search(rf"^2–3    node-b       {state}$", text_of(record), re.MULTILINE)


def test_control_characters_of_others_reach_no_terminal() -> None:
    evil = replace(JOB, run_id="a\x1b]0;x\x07b", terms=Terms(2, 2, 3, None, "train.py\x1b[2J"))
    ranks = (RankReport(0, 0, 1, "run\x1bning", 3, "\x1b[31mred\n"),)
    nodes = {"node-a-00000001": replace(node(1, "node-a", range(0), waiting="\x9b31m"), ranks=ranks)}

    record = status_record(known(job=evil, nodes=nodes, silent={"node-b-00000002": "\x1b"}), NOW)
    shown = text_of(record, every_rank=True)

    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert "\\x1b" in shown
    assert "\x1b" not in json.dumps(record)


def test_the_schema_has_each_field_of_the_object() -> None:
    schema = json.loads((REPOSITORY / "docs" / "status.schema.json").read_text())["properties"]
    outcome = Outcome(OutcomeKind.FAILED, "the budget is spent", 1, 3, 3)
    record = status_record(known(job=replace(JOB, ended=outcome)), NOW)

    assert schema.keys() == record.keys()
    for field, value in record.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            assert schema[field].get("items", schema[field])["properties"].keys() == inner.keys(), field
    assert record["state"] in schema["state"]["enum"]
