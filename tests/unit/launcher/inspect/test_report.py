"""inspect.report: folders as runs leave them, and as they may be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.inspect.report import COMMAND, find_run
from tests.commands import call
from tests.unit.launcher.inspect.timelines import Timeline, restarted


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

    assert find_run(tmp_path) == new
    assert find_run(old) == old


def test_what_is_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=r"holds no run with a timeline\.jsonl; give a run's folder"):
            report(path)
    (tmp_path / "timeline.jsonl").touch()
    with pytest.raises(UsageError, match="holds no event"):
        report(tmp_path)


def test_the_page_goes_beside_the_timeline_or_where_the_user_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = put(tmp_path / "night_00000000", restarted())

    assert report(run) == 0
    assert report(run, "-o", tmp_path / "p.html") == 0
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert numbers(capsys, run)["steps_lost"] == 3

    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (run / "report.html").stat().st_mode & 0o007 == 0
    assert (tmp_path / "p.html").read_text() == (run / "report.html").read_text()
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UsageError, match=r"p\.html cannot be written .* give another with -o"):
        report(run, "-o", tmp_path / "absent" / "p.html")
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory"):
        report(run, "-o", tmp_path)


def test_nodes_of_one_job_are_joined_and_other_jobs_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ("a1", "b1")
    run = put(
        tmp_path / "2026-11-23_10-00-00_night_node-a_00000000", Timeline("node-a", node_id="a1", seats=ids).opens(0, 0)
    )
    put(
        tmp_path / "2026-11-23_10-00-00_night_node-b_00000001",
        Timeline("node-b", 2, node_id="b1", seats=ids).opens(0, 0),
    )
    other = Timeline("node-c", node_id="a1", seats=ids).opens(0, 0)
    other.rows[0]["run_id"] = "night_watch"
    put(tmp_path / "2026-11-23_10-00-00_night_watch_00000002", other)

    hosts = [node["host"] for node in numbers(capsys, run)["nodes"]]  # type: ignore[attr-defined]

    assert hosts == ["node-a", "node-b"]


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


def test_the_trainers_metrics_are_found_by_its_command(tmp_path: Path) -> None:
    job = restarted()
    job.rows[0] |= {"command": "-m elaunch.trainer --out 'runs/a b' --steps 9", "cwd": str(tmp_path)}
    run = put(tmp_path / "night_00000000", job)
    metrics = tmp_path / "runs" / "a b" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1, "loss": 2, "seconds": 1}\n{"step": 2, "loss": 1, "seconds": 1}\n')

    assert report(run) == 0
    assert str(metrics) in (run / "report.html").read_text()
    with pytest.raises(UsageError, match="has no line with a step"):
        report(run, "--metrics", run / "timeline.jsonl")


def test_logs_are_linked_relative_to_the_page_and_only_if_they_hold_something(tmp_path: Path) -> None:
    run = put(tmp_path / "logs" / "night_00000000", restarted())
    for rank, text in ((0, ""), (1, "last line\n")):
        (run / "attempt_0" / str(rank)).mkdir(parents=True)
        for name in ("stderr.log", "stdout.log.1"):
            (run / "attempt_0" / str(rank) / name).write_text(text)
    (run / "attempt_x").mkdir()

    assert report(run, "-o", tmp_path / "page.html") == 0

    page = (tmp_path / "page.html").read_text()
    assert 'href="logs/night_00000000/attempt_0/1/stderr.log"' in page
    assert 'href="logs/night_00000000/attempt_0/1/stdout.log.1"' in page
    assert "attempt_0/0/stderr.log" not in page


def test_stacks_of_a_hang_are_linked_relative_to_the_page_those_of_the_named_ranks_node_first(tmp_path: Path) -> None:
    hang = {"host": "node-b", "rank": 2, "message": "it runs"}
    seats = ("a1", "b1", "c1")
    jobs = [
        Timeline("node-a", node_id="a1", seats=seats), Timeline("node-b", 2, node_id="b1"),
        Timeline("node-c", 4, node_id="c1"),
    ]  # fmt: skip
    for job in jobs:
        folder = put(tmp_path / "logs" / f"night_{job.host}_00000000", job.opens(0, 0).add(70, 0, "seems_hung", **hang))
        (folder / "attempt_0").mkdir()
        (folder / "attempt_0" / "stacks.txt").write_text(job.host)
    # A link may lead to what the reader of the page must not see.
    (folder / "attempt_0" / "stacks.txt").unlink()
    (folder / "attempt_0" / "stacks.txt").symlink_to("/etc/passwd")

    assert report(tmp_path / "logs" / "night_node-a_00000000", "-o", tmp_path / "page.html") == 0

    links = re.findall(r'href="([^"#]+)">(stacks[^<]*)<', (tmp_path / "page.html").read_text())
    assert [name for _, name in links] == ["stacks.txt of node-b", "stacks.txt of node-a"]
    assert [(tmp_path / link).read_text() for link, _ in links] == ["node-b", "node-a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_folder_that_another_user_put_beside_the_runs_is_no_node_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = put(tmp_path / "night_00000000", Timeline(node_id="a1", seats=("a1", "b1")).opens(0, 0))
    strange = put(tmp_path / "night_11111111", Timeline("node-b", first_rank=2, node_id="b1").opens(0, 0))
    assert len(numbers(capsys, own)["nodes"]) == 2  # type: ignore[arg-type]

    os.chown(strange, 65534, 65534)

    assert len(numbers(capsys, own)["nodes"]) == 1  # type: ignore[arg-type]
    assert len(numbers(capsys, own, strange)["nodes"]) == 2, "it is given"  # type: ignore[arg-type]


def test_a_timelines_text_reaches_no_terminal_with_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = restarted()
    job.rows[0] |= {"run_id": "night\x1b]0;title\x07\u202e\nforged", "command": 7}

    assert report(put(tmp_path / "night_00000000", job)) == 0

    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    # The headline, the failure, the hours and the page's path: a timeline adds no line.
    assert len(lines) == 4
