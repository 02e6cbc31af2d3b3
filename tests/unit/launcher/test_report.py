"""launcher.report: the report for the user at the end, and the error file that is passed on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elaunch.launcher.report import record, report, write_error_file
from elaunch.rendezvous.types import Failure, FailureKind, JobSpec, Outcome, OutcomeKind, Program, ProgramKind
from tests.fuzzing import NESTED

SPEC = JobSpec("job", Program(ProgramKind.SCRIPT, "train.py", ("--lr", "1")), max_restarts=3)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/home/u/train.py", line 3, in f\n'
    "    raise ValueError('bad')\n"
    "ValueError: bad"
)
RAISED = Failure(
    FailureKind.EXCEPTION,
    generation=3,
    node_id="node-a-1",
    host="node-a",
    rank=5,
    local_rank=1,
    pid=4711,
    code=1,
    message="raised ValueError: bad",
    exception="ValueError",
    frame="/home/u/train.py:3 in f",
    traceback=TRACEBACK,
    tail=f"loading\nepoch 1\n{TRACEBACK}\n",
    failed_at=1.0,
)
KILLED = replace(
    RAISED, kind=FailureKind.SIGNAL, code=-9, message="was killed by SIGKILL", traceback="", tail="last line\n"
)
FAILED = Outcome(OutcomeKind.FAILED, "the budget of 3 restarts is spent", 3, 3, 3, RAISED)


def failed(failure: Failure, logs: Path | None = None) -> str:
    return report(replace(FAILED, failure=failure), SPEC, logs)


HOSTILE = "x\nelaunch: succeeded\relaunch: succeeded\x1b]0;x\x07"


def test_no_text_of_another_nodes_record_makes_a_line_of_elaunchs_own() -> None:
    names = ("host", "message", "exception", "frame", "traceback", "tail", "log_path", "error_file", "advice")

    text = failed(replace(RAISED, **dict.fromkeys(names, HOSTILE), is_cut=True), Path("logs"))  # type: ignore[arg-type]
    ended = report(replace(FAILED, kind=OutcomeKind.UNKNOWN, reason=HOSTILE), SPEC, None)

    assert [line for line in text.split("\n") if line.startswith("elaunch: succ") or not line.isprintable()] == []
    assert ended.splitlines()[1:] == []


def test_the_text_that_scripts_search_for_in_torchruns_box_is_there() -> None:
    lines = failed(RAISED).splitlines()

    start = lines.index("Root Cause (first observed failure):")
    assert lines[start + 1] == "[0]:"
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines[start + 2 :]}
    assert fields["host"] == "node-a"
    assert fields["rank"] == "5 (local_rank: 1)"
    assert fields["exitcode"] == "1 (pid: 4711)"
    assert fields["error_file"] == "<N/A>"


def test_a_signal_is_named_beside_the_exit_code() -> None:
    assert "-9 (pid: 4711)  (SIGKILL)" in failed(KILLED)


def test_the_traceback_is_shown_once_and_what_was_printed_before_it_too() -> None:
    text = failed(RAISED)

    assert text.count("Traceback (most recent call last):") == 1
    assert text.count("line 3, in f") == 1
    assert "    epoch 1" in text
    assert "its last 2 lines" in text


def test_without_a_traceback_the_end_of_stderr_is_shown_and_no_more() -> None:
    text = failed(replace(KILLED, tail="".join(f"line {n}\n" for n in range(100))))

    assert "    line 99" in text
    assert "    line 80" in text
    assert "line 79" not in text


def test_the_jobs_first_failure_comes_first_where_another_kind_ended_the_job() -> None:
    first = replace(RAISED, generation=0, rank=1, message="raised ValueError: loss is nan", advice="clip the gradients")
    outcome = replace(FAILED, failure=replace(KILLED, advice="see dmesg"), first=first)

    text = report(outcome, SPEC, None)

    _, first_line, then, _, *steps = text.splitlines()[1:7]
    assert first_line == (
        "failed first in generation 0: rank 1 (local rank 1 on node-a, pid 4711) raised ValueError: loss is nan."
    )
    assert then == "rank 5 (local rank 1 on node-a, pid 4711) was killed by SIGKILL in generation 3."
    assert steps == ["Next step (generation 0): clip the gradients.", "Next step (generation 3): see dmesg."]
    root, last = text.index("Root Cause (first observed failure):"), text.index("What ended the job (last failure):")
    assert root < text.index("ValueError: bad") < last < text.index("last line")
    assert list(record(outcome, None))[-2:] == ["first_failure", "failure"]
    lost = report(replace(outcome, failure=None, reason="node-b was lost"), SPEC, None)
    assert "loss is nan.\nWhy it stopped: node-b was lost; 3 of 3 restarts used.\nNext step: clip" in lost
    assert "What ended the job" not in lost


def test_a_node_that_does_not_fit_the_job_reports_why_and_names_no_output_for_it_had_none() -> None:
    refused = replace(FAILED, kind=OutcomeKind.REFUSED, reason="--nnodes 2 there, 3 here", failure=None)

    assert report(refused, SPEC, Path("/logs/job_1")) == "elaunch: --nnodes 2 there, 3 here\n"
    assert refused.exit_code == 2


def handed_on(folder: Path, recorded: str | None) -> Any:
    """The record that is written after a rank that has recorded its failure so, or not at all."""
    theirs, ours = folder / "theirs.json", folder / "ours.json"
    if recorded is not None:
        theirs.write_text(recorded, "latin-1")
    write_error_file(replace(FAILED, failure=replace(RAISED, error_file=str(theirs))), str(ours), lambda *_: None)
    return json.loads(ours.read_text())


def test_the_first_failures_record_is_handed_on_with_its_exit_code(tmp_path: Path) -> None:
    record = {"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "T", "timestamp": "10"}}}

    assert handed_on(tmp_path, json.dumps(record)) == {"message": {**record["message"], "errorCode": 1}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.json", "theirs.json"]
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "who may read it follows from the umask"


@pytest.mark.parametrize("text", [None, "", '{"mess', '{"message": "short"}', "{}", "[1]", "[[[], 1]]", "\xff", NESTED])
def test_where_there_is_no_whole_record_ours_is_handed_on(tmp_path: Path, text: str | None) -> None:
    message = handed_on(tmp_path, text)["message"]

    assert message["message"] == RAISED.sentence
    assert message["extraInfo"] == {"py_callstack": TRACEBACK, "timestamp": "1"}
    assert message["errorCode"] == 1


def test_a_record_that_may_be_nested_too_deeply_to_be_written_is_copied_or_ours_is_handed_on(tmp_path: Path) -> None:
    deep = '{"message":{"a":' + "[" * 950 + "]" * 950 + "}}"

    assert handed_on(tmp_path, deep)["message"]["errorCode"] == 1


CUT = replace(
    RAISED,
    message="raised RuntimeError: " + "x" * 3000,
    traceback="".join(f"  line {number}\n" for number in range(50_000)) + "RuntimeError: " + "x" * 5000,
    tail="",
    error_file="/logs/5/error.json",
    log_path="/logs/5/stderr.log",
)


def test_a_long_traceback_is_shown_by_its_ends_and_the_report_names_what_is_missing_and_where_it_is() -> None:
    lines = failed(CUT, Path("/logs")).splitlines()

    assert len(lines) < 160
    assert max(map(len, lines)) < 3000
    assert "      line 0" in lines
    assert any("lines are not shown here" in line for line in lines)
    assert any("RuntimeError: xxx" in line and "more characters)" in line for line in lines)
    assert "  in full   : /logs/5/error.json on node-a" in lines


WRONG_ARGUMENTS = replace(
    RAISED,
    kind=FailureKind.STARTUP,
    code=2,
    exception="",
    frame="",
    traceback="",
    message="exited with code 2 (the exit code of a wrong command line)",
    tail="No such option: --stepz (Possible options: --steps); see elaunch -m elaunch.trainer --help\n",
)


def refused(failure: Failure) -> str:
    """The report on a job that ends by this failure without a restart."""
    return report(replace(FAILED, restarts=0, failure=failure), SPEC, None)


def test_a_programs_error_about_its_own_arguments_is_one_line() -> None:
    assert refused(WRONG_ARGUMENTS) == (
        "elaunch: train.py FAILED on node-a: rank 5 exited with code 2 (the exit code of a wrong command line): No such"
        " option: --stepz (Possible options: --steps); see elaunch -m elaunch.trainer --help; exit code 1\n"
    )


def test_another_end_with_little_output_has_the_whole_report() -> None:
    assert "Root Cause" in refused(replace(WRONG_ARGUMENTS, tail=""))
    assert "Root Cause" in refused(replace(WRONG_ARGUMENTS, kind=FailureKind.EXIT_CODE))


def test_paths_in_a_traceback_are_normalised_unless_that_may_be_another_file(tmp_path: Path) -> None:
    (tmp_path / "there" / "below").mkdir(parents=True)
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("there/below")
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "there" / "train.py").touch()
    frames = "".join(f'  File "{tmp_path}/{path}", line 3, in f\n' for path in ("./x/../train.py", "link/../train.py"))

    text = failed(replace(RAISED, traceback=f"Traceback (most recent call last):\n{frames}ValueError: bad"))

    assert f'File "{script}", line 3' in text
    assert f'File "{tmp_path}/link/../train.py", line 3' in text
