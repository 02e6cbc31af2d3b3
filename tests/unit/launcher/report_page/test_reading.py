"""report_page.reading and .command: folders as runs leave them, and as they may be."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.report_page import command, reading
from elaunch.launcher.report_page.command import COMMAND
from tests.commands import call
from tests.fuzzing import bounded
from tests.harness import RUN_LIMIT_S
from tests.unit.launcher.report_page.timelines import Timeline, restarted


def put(folder: Path, job: Timeline) -> Path:
    folder.mkdir(parents=True)
    (folder / "timeline.jsonl").write_bytes(job.text)
    return folder


def report(*argv: str | Path) -> int:
    return call(COMMAND, *map(str, argv))


def numbers(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, object]:
    assert report(*argv, "--json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_log_dir_means_its_newest_run(tmp_path: Path) -> None:
    old = put(tmp_path / "2026-11-22_10-00-00_a_00000000", Timeline())
    new = put(tmp_path / "2026-11-23_10-00-00_b_00000000", Timeline())
    os.utime(old / "timeline.jsonl", (1, 1))

    assert reading.find(tmp_path) == new
    assert reading.find(old) == old
    (tmp_path / "latest").symlink_to(old.name)
    assert reading.find(tmp_path) == old
    assert reading.find(tmp_path / "latest") == old


def test_what_is_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "nothing", "there is no folder"), (tmp_path, "holds no run with a timeline.jsonl")):
        with pytest.raises(UsageError, match=said):
            report(path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no folder"):
        report(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot be read \(File name too long"):
        report(tmp_path / ("x" * 300))
    (tmp_path / "timeline.jsonl").touch()
    with pytest.raises(UsageError, match="holds no event"):
        report(tmp_path)
    with pytest.raises(UsageError, match="no folder is given"):
        report()
    with pytest.raises(UsageError, match="--jsn is no option of elaunch report; did you mean --json"):
        report("--jsn", tmp_path)


def test_the_page_goes_beside_the_timeline_or_where_the_user_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = put(tmp_path / "night_00000000", restarted())

    assert report(run) == 0
    assert report(run, "-o", tmp_path / "p.html", "--perfetto", tmp_path / "t.json") == 0

    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["Job night succeeded after 60.0 s: 1 restart, 3 steps lost.", str(run / "report.html")]
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (run / "report.html").stat().st_mode & 0o007 == 0
    assert (tmp_path / "p.html").read_text() == (run / "report.html").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    with pytest.raises(UsageError, match=r"p\.html cannot be written .* give another with -o"):
        report(run, "-o", tmp_path / "absent" / "p.html")


def test_numbers_alone_write_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = put(tmp_path / "night_00000000", restarted())

    assert numbers(capsys, run)["steps_lost"] == 3
    assert [path.name for path in run.iterdir()] == ["timeline.jsonl"]


def test_nodes_of_one_job_are_joined_and_other_jobs_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = put(tmp_path / "2026-11-23_10-00-00_night_node-a_00000000", Timeline("node-a").opens(0, 0).succeeds(50, 0))
    put(
        tmp_path / "2026-11-23_10-00-00_night_node-b_00000001",
        Timeline("node-b", 2, started_s=0.2).opens(0.2, 0).succeeds(50, 0),
    )
    other = Timeline("node-c", started_s=1)
    other.rows[0]["run_id"] = "night_watch"
    put(tmp_path / "2026-11-23_10-00-00_night_watch_00000002", other)
    # The same name again, right after the end.
    put(tmp_path / "2026-11-23_10-00-51_night_node-a_00000003", Timeline("node-a", started_s=51).opens(51, 0))

    hosts = [node["host"] for node in numbers(capsys, run)["nodes"]]  # type: ignore[attr-defined]

    assert hosts == ["node-a", "node-b"]


def test_a_job_whose_end_is_not_known_is_not_joined_with_that_of_the_next_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = put(tmp_path / "night_node-a_00000000", Timeline("node-a").opens(0, 0))
    put(tmp_path / "night_node-b_00000001", Timeline("node-b", started_s=86400).opens(86401, 0))

    assert len(numbers(capsys, run)["nodes"]) == 1  # type: ignore[arg-type]


def test_a_node_that_was_replaced_is_of_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = put(tmp_path / "night_node-a_00000000", Timeline("node-a").opens(0, 0).opens(100, 1).succeeds(200, 1))
    put(tmp_path / "night_node-b_00000001", Timeline("node-b", 2).opens(0, 0))
    put(tmp_path / "night_node-c_00000002", Timeline("node-c", 2, started_s=99).opens(100, 1).succeeds(200, 1))

    assert len(numbers(capsys, run)["nodes"]) == 3  # type: ignore[arg-type]


def test_an_unnamed_job_that_was_killed_is_not_joined_with_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start, ids in ((0, ("a1", "b1")), (5, ("a2", "b2"))):
        for host, node_id in zip(("node-a", "node-b"), ids, strict=True):
            job = Timeline(host, started_s=start, node_id=node_id, seats=ids).opens(start, 0)
            put(tmp_path / f"night_{host}_0000000{start}", job)
    # Killed before it had a seat.
    put(tmp_path / "night_node-b_00000001", Timeline("node-b", started_s=2))
    late = Timeline("node-c", started_s=6, node_id="c2").add(7, 0, "joined", node_id="c2")
    late.add(8, 0, "spare", nodes=[{"node_id": "b2"}])
    put(tmp_path / "night_node-c_00000006", late)

    nodes = numbers(capsys, tmp_path / "night_node-b_00000005")["nodes"]

    folders = sorted(Path(node["folder"]).name for node in nodes)  # type: ignore[attr-defined]
    assert folders == ["night_node-a_00000005", "night_node-b_00000005", "night_node-c_00000006"]


def test_the_trainers_metrics_are_found_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = restarted()
    job.rows[0] |= {"command": "-m elaunch.trainer --out 'runs/a b' --steps 9", "cwd": str(tmp_path)}
    run = put(tmp_path / "night_00000000", job)
    metrics = tmp_path / "runs" / "a b" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1, "loss": 2, "seconds": 1, "generation": 0, "steps_lost": 5}\n' * 3)

    assert numbers(capsys, run)["steps_lost"] == 5
    assert report(run) == 0
    assert str(metrics) in (run / "report.html").read_text()
    with pytest.raises(UsageError, match="has no line with a step"):
        report(run, "--metrics", run / "timeline.jsonl")


def test_logs_are_linked_relative_to_the_page_and_only_if_they_hold_something(tmp_path: Path) -> None:
    run = put(tmp_path / "logs" / "night_00000000", restarted())
    for rank, text in ((0, ""), (1, "last words\n")):
        (run / "attempt_0" / str(rank)).mkdir(parents=True)
        (run / "attempt_0" / str(rank) / "stderr.log").write_text(text)
    (run / "attempt_x").mkdir()

    assert report(run, "-o", tmp_path / "page.html") == 0

    page = (tmp_path / "page.html").read_text()
    assert 'href="logs/night_00000000/attempt_0/1/stderr.log"' in page
    assert "attempt_0/0/stderr.log" not in page
    assert "last words" in page


def test_stacks_of_a_hang_are_linked_relative_to_the_page_those_of_the_named_ranks_node_first(tmp_path: Path) -> None:
    hang = {"host": "node-b", "rank": 2, "message": "it runs"}
    jobs = [Timeline("node-a").opens(0, 0).succeeds(99, 0), Timeline("node-b", 2).opens(0, 0).succeeds(99, 0)]
    for job in jobs:
        folder = put(tmp_path / "logs" / f"night_{job.host}_00000000", job.add(70, 0, "seems_hung", **hang))
        (folder / "attempt_0").mkdir()
        (folder / "attempt_0" / "stacks.txt").write_text(job.host)
    # A link may lead to what the reader of the page must not see.
    (folder / "attempt_1").mkdir()
    (folder / "attempt_1" / "stacks.txt").symlink_to("/etc/passwd")

    assert report(tmp_path / "logs" / "night_node-a_00000000", "-o", tmp_path / "page.html") == 0

    links = re.findall(r'href="([^"#]+)">(stacks[^<]*)<', (tmp_path / "page.html").read_text())
    assert [name for _, name in links] == ["stacks.txt of node-b", "stacks.txt of node-a"]
    assert [(tmp_path / link).read_text() for link, _ in links] == ["node-b", "node-a"]
    assert reading.stacks_file(folder, 1) == ""


def test_a_failed_ranks_log_is_linked_however_many_newer_logs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_LOGS_MAX", 2)
    folder = put(tmp_path / "night_00000000", restarted())
    for generation, rank in ((0, 1), (1, 0), (1, 1)):
        place = folder / f"attempt_{generation}" / str(rank)
        place.mkdir(parents=True)
        (place / "stderr.log").write_text("said")

    assert report(folder) == 0

    assert 'href="attempt_0/1/stderr.log"' in (folder / "report.html").read_text()


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write(b"half a line that is cut" + b"\xff" * reading.TAIL_BYTES + b"\nlast words\n")

    with bounded():
        assert reading.tail(tmp_path, ["stderr.log"]) == "last words\n"


def test_lines_without_an_end_cost_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with path.open("wb") as file:
        file.write(Timeline().text)
        file.seek(40 << 20, os.SEEK_CUR)
        file.write(b"\n" + Timeline().text)

    with bounded(memory_bytes=64 << 20):
        lines = reading.read_folder(tmp_path).lines

    assert [event.event for event in lines.events] == ["started", "started"]
    assert lines.unreadable == 1


def test_a_pipe_in_a_files_place_is_not_opened(tmp_path: Path) -> None:
    run = put(tmp_path / "night_00000000", restarted())
    for rank in (0, 1):
        (run / "attempt_0" / str(rank)).mkdir(parents=True)
    os.mkfifo(run / "attempt_0" / "1" / "stderr.log")

    assert reading.tail(run, ["attempt_0", "1", "stderr.log"]) is None
    assert report(run) == 0


@pytest.mark.parametrize("linked", ["attempt_0", "attempt_0/1", "attempt_0/1/stderr.log"])
def test_a_log_that_is_a_link_to_elsewhere_is_not_shown(tmp_path: Path, linked: str) -> None:
    # Whoever made the folder cannot read what root, or whoever calls the report, can.
    run = put(tmp_path / "night_00000000", restarted())
    log = run / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("a secret key\n")
    (run / linked).rename(tmp_path / "elsewhere")
    (run / linked).symlink_to(tmp_path / "elsewhere")

    assert report(run) == 0

    assert "a secret key" not in (run / "report.html").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_folder_that_another_user_put_beside_the_runs_is_no_node_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = put(tmp_path / "night_00000000", restarted())
    strange = put(tmp_path / "night_11111111", Timeline("node-b", first_rank=2).opens(0, 0))
    assert len(numbers(capsys, own)["nodes"]) == 2  # type: ignore[arg-type]

    os.chown(strange, 65534, 65534)

    assert len(numbers(capsys, own)["nodes"]) == 1  # type: ignore[arg-type]
    assert len(numbers(capsys, own, strange)["nodes"]) == 2, "it is given"  # type: ignore[arg-type]


def test_what_a_timeline_says_reaches_no_terminal_with_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = restarted()
    job.rows[0]["run_id"] = "night\x1b]0;title\x07\u202e"

    assert report(put(tmp_path / "night_00000000", job)) == 0

    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_a_timeline_adds_no_line_to_what_is_printed_and_may_have_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = restarted()
    run = put(tmp_path / "night_00000000", job)
    assert report(run) == 0
    lines = len(capsys.readouterr().out.splitlines())

    for given in ("", None, 7, ["a"]):
        job.rows[0] |= {"run_id": "night\nforged", "command": given}
        (run / "timeline.jsonl").write_bytes(job.text)

        assert report(run) == 0
        assert len(capsys.readouterr().out.splitlines()) == lines, given


def test_a_reader_that_closes_the_pipe_early_is_no_error(tmp_path: Path) -> None:
    put(tmp_path / "night_00000000", restarted())
    command = shlex.join([sys.executable, "-m", "elaunch", "report", str(tmp_path)])

    for options in ("--json", "-o -"):
        # The reader is gone before the first byte.
        done = subprocess.run(
            ["bash", "-c", f"{command} {options} | true; echo ${{PIPESTATUS[0]}}"],
            capture_output=True,
            timeout=RUN_LIMIT_S,
        )

        assert (done.stdout, done.stderr) == (b"0\n", b"")


def test_a_link_in_a_logs_place_is_not_followed(tmp_path: Path) -> None:
    run = put(tmp_path / "run_00000000", restarted())
    (tmp_path / "secret").write_text("not for the page's readers\n")
    (run / "attempt_0" / "1").mkdir(parents=True)
    (run / "attempt_0" / "1" / "stderr.log").symlink_to(tmp_path / "secret")

    assert report(run) == 0

    assert "not for the page" not in (run / "report.html").read_text()


def test_a_pipe_or_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    run, pipe = put(tmp_path / "run_00000000", Timeline()), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    assert report(run, "-o", pipe) == 0

    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16).startswith(b"<!DOCTYPE html>")
    os.close(reader)


def test_a_folder_in_a_files_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = put(tmp_path / "run_00000000", Timeline())
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())

    for folder in (".", "/", str(tmp_path)):
        with pytest.raises(UsageError, match=r"cannot be written \(Is a directory"):
            report(run, "-o", folder)
    assert sorted(tmp_path.iterdir()) == before


def test_only_one_can_have_stdout(tmp_path: Path) -> None:
    for words in (("-o", "-", "--json"), ("-o", "-", "--perfetto", "-"), ("--perfetto", "-", "--json")):
        with pytest.raises(UsageError, match="only one can have stdout"):
            report(tmp_path, *words)
