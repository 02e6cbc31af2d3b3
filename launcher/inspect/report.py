"""`elaunch report`: what happened in a run, as one HTML page, text and JSON, from the folder in its --log-dir.

Files there may be huge, torn, or not what they are called: every read has a limit, and only regular files are opened.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import quote

import click

from elaunch.launcher.errors import UsageError
from elaunch.launcher.inspect.history import Incident, PastGeneration, goodput, history
from elaunch.launcher.inspect.node_log import TIMELINE, NodeLog, PastEvent, node_log, text
from elaunch.launcher.inspect.page import Links, Report, StepMetrics, render
from elaunch.launcher.inspect.text import cut, offset, sentence
from elaunch.launcher.options.command_line import Command, Option
from elaunch.launcher.report import write_whole
from elaunch.rendezvous.format import plain

PAGE = "report.html"
# The limit of links to stacks, for each generation.
_STACKS_MAX = 8
# At most this many failures and warnings are printed, the newest ones.
PRINTED_MAX = 10
# Unlike `Path.is_file`, it is false where the folder cannot be read.
_is_file = os.path.isfile
STACKS = "stacks.txt"
# A week of a node's events is some 10 MB.
_BYTES_MAX = 256 << 20
# A line with a traceback has 64 kB.
_LINE_BYTES_MAX = 1 << 20
# Entries of a log folder that are searched, the last ones by name.
_FOLDERS_MAX = 2000


def _main(ctx: click.Context) -> int:
    """Make the report. Returns the exit code. Raises UsageError."""
    given, is_json = ctx.params["folders"], ctx.params["json"]
    if not given:
        raise UsageError("report: no folder is given; give a run's folder below --log-dir, or the --log-dir itself")
    page, metrics_path = (Path(word) if (word := ctx.params[name]) else None for name in ("output", "metrics"))
    folders = tuple(dict.fromkeys(find_run(folder) for folder in given))
    job = read_job(folders)
    target = page or (None if is_json else folders[0] / PAGE)
    report = read_report(job, metrics_path, (target or folders[0] / PAGE).absolute().parent)
    if target:
        html = render(report, Path(__file__).with_name("page.html").read_text())
        try:
            write_whole(target, html)
        except OSError as error:
            raise UsageError(f"report: {target} cannot be written ({error.strerror}); give another with -o") from None
    if is_json:
        click.echo(json.dumps(summary(report), indent=1))
    else:
        # Each is one line: a forged timeline adds none.
        click.echo("\n".join([*(plain(line) for line in printed(report)), str(target)]))
    return 0


COMMAND = Command(
    "report",
    _main,
    [
        Option("output", "FILE", "write the page there [report.html in the run's folder]", short="o"),
        Option("json", "", "print the numbers as JSON, and write a page only with -o"),
        Option("metrics", "FILE", "lines of JSON with step, loss and seconds [those of elaunch.trainer's --out]"),
        click.Argument(["folders"], nargs=-1, type=click.Path(path_type=Path)),
    ],
    usage=["[-o FILE] [--json] [--metrics FILE] DIR…"],
    about="""Show what happened in a run: one HTML page from the folder that it left in --log-dir.

DIR is the run's folder, or the --log-dir itself for its newest run; folders of the job's other nodes
are found beside it, or given too.""",
    ending="""The page needs no network and no other file. It shows what failed and why, each rank's timeline,
where the time went (ETTR), and curves of loss and step time.""",
)


def read_report(job: Sequence[NodeLog], metrics_path: Path | None, beside: Path) -> Report:
    """The report of a job, with links relative to the folder `beside`. Raises UsageError."""
    found = metrics_path or next((path for each in job if (path := metrics_file(each.started))), None)
    metrics = StepMetrics(lines_of(found)) if found else None
    if metrics_path and not (metrics and metrics.steps):
        raise UsageError(f"report: --metrics {metrics_path} has no line with a step; give lines of JSON")
    past = history(job)
    report = Report(past, goodput(past), metrics, str(found or ""))
    links, stacks = {}, {}
    for shown in (*report.causes, *past.warned):
        if shown.is_cause and shown.folder and shown.rank >= 0:
            folder = Path(shown.folder, f"attempt_{shown.generation}", str(shown.rank))
            names = ("stderr.log", "stderr.log.1", "stdout.log", "stdout.log.1", "error.json")
            files = [(name, folder / name) for name in names]
            links[shown] = _links(files, beside)
        # The named rank's node comes first.
        nodes = sorted(past.nodes, key=lambda node: node.folder != shown.folder)
        files = [(f"{STACKS} of {n.name}", Path(n.folder, f"attempt_{shown.generation}", STACKS)) for n in nodes]
        stacks[shown.generation] = _links(files, beside)[:_STACKS_MAX]
    return replace(report, links=links, stacks=stacks)


def _links(files: Sequence[tuple[str, Path]], beside: Path) -> Links:
    """Names of files with content, and their percent-encoded URLs, relative to the folder `beside`."""
    return tuple(
        (name, quote(os.path.relpath(path, beside), errors="surrogateescape"))
        for name, path in files
        if _is_file(path) and not path.is_symlink() and path.stat().st_size > 0
    )


def printed(report: Report) -> list[str]:
    """The report as text: the headline, the newest failures and warnings with what came after, the workers' hours."""
    causes = [fault for fault in report.history.faults if fault.is_cause]
    shown = sorted([*causes, *report.history.warned], key=lambda each: each.at_s)
    lines = [
        f"  {offset(each.at_s)}  {sentence(cut(each.sentence, 400))} {report.after(each)}".rstrip()
        for each in shown[-PRINTED_MAX:]
    ]
    left_out = len(shown) - len(lines)
    more = [f"  {left_out} earlier failures and warnings are left out; --json has all"] if left_out else []
    return [report.headline, *more, *lines, f"  {report.goodput.hours}"]


def summary(report: Report) -> dict[str, object]:
    """The numbers for programs (`--json`). Unknown values are null."""
    past, found = report.history, report.goodput
    end = past.end
    return {
        "run_id": past.run_id,
        "headline": report.headline,
        "state": "ended" if end.outcome else "unknown",
        "outcome": end.outcome or None,
        "exit_code": _known(end.code),
        "reason": end.reason,
        "command": past.command,
        "began_at": past.began_at,
        "wall_s": _known(past.wall_s),
        "ettr": _known(found.ettr),
        "restarts": end.restarts,
        "max_restarts": _known(end.max_restarts),
        "steps_lost": _known(past.steps_lost),
        "worker_hours": {"used": _known(found.used_h), "lost": _known(found.lost_h)},
        "breakdown_s": {stage.key: _known(seconds) for stage, seconds in found.seconds.items()},
        "nodes": [{"host": node.host, "folder": node.folder} for node in past.nodes],
        "generations": [{**_record(each), "steps_lost": each.steps_lost} for each in past.generations if each.has_run],
        "failures": [
            {**_record(fault), "recovery_s": _known(found.recoveries_s.get(fault.generation, math.nan))}
            for fault in past.faults
        ],
        "warnings": [_record(warned) for warned in past.warned],
        "remarks": list(past.remarks),
    }


def _record(item: PastGeneration | Incident) -> dict[str, object]:
    """The item's fields; times are seconds from the start of the job."""
    return {name: _known(value) for name, value in asdict(item).items()}


def _known(value: object) -> object:
    """The value; None for a time or a number that is not known."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return None if value == -1 else value


def find_run(path: Path) -> Path:
    """The run's folder that `path` means: itself, or the newest run of a --log-dir. Raises UsageError."""
    runs = [path] if _is_file(path / TIMELINE) else _runs(path)
    if not runs:
        raise UsageError(
            f"report: {path} holds no run with a {TIMELINE}; give a run's folder below --log-dir, or the --log-dir"
        )
    return max(runs, key=lambda run: (run / TIMELINE).stat().st_mtime).resolve()


def read_job(folders: Sequence[Path]) -> list[NodeLog]:
    """The logs of the given folders, and of the job's other nodes beside them. Raises UsageError without any event."""
    given = [read_folder(folder) for folder in folders]
    job = [folder for folder in given if folder.events]
    if not job:
        raise UsageError(
            f"report: {folders[0] / TIMELINE} holds no event: the job's agent ended before its first, or the file is"
            " another program's"
        )
    # Another user of a shared --log-dir could name a folder like a job's.
    beside = {
        path.resolve()
        for folder in folders
        for path in _runs(folder.parent)
        if path.stat().st_uid == folder.stat().st_uid
    }
    # Each folder has the job's name in its own, and other jobs' files are not read.
    names = {log.started.text("run_id").replace("/", "_") for log in job} - {""}
    named = sorted(path for path in beside - set(folders) if any(name in path.name for name in names))
    # A name may be reused: a later run has other nodes.
    known = {node for log in job for node in _nodes(log)}
    return job + [log for log in map(read_folder, named) if not known.isdisjoint(_nodes(log))]


def read_folder(folder: Path) -> NodeLog:
    """One node's log. Without a timeline that can be read it has no events."""
    return node_log(str(folder), lines_of(folder / TIMELINE))


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a regular file; nothing if it cannot be read. A line that is too long comes in pieces."""
    # Opening a pipe would block, and a device has no end.
    if not _is_file(path):
        return
    with suppress(OSError), path.open("rb") as file:
        while file.tell() < _BYTES_MAX and (line := file.readline(_LINE_BYTES_MAX)):
            yield line


def metrics_file(started: PastEvent) -> Path | None:
    """The metrics file of the bundled trainer, by its command line (in `started`); None if there is none."""
    out = re.search(r"--out[= ]('[^']+'|\S+)", started.text("command"))
    path = Path(started.text("cwd") or ".", out[1].strip("'"), "metrics.jsonl") if out else None
    return path if path and _is_file(path) else None


def _runs(folder: Path) -> list[Path]:
    try:
        entries = sorted((entry for entry in os.scandir(folder) if not entry.is_symlink()), key=lambda e: e.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries[-_FOLDERS_MAX:] if _is_file(Path(entry.path, TIMELINE))]


def _nodes(log: NodeLog) -> Iterator[tuple[str, str]]:
    """Pairs of the job's name and a node id, from this log's tables and its agent's own joins."""
    run_id = log.started.text("run_id")
    tables = [event.items("nodes") for event in log.events if event.event in ("sealed", "spare")]
    names = [text(seat.get("node_id")) for table in tables for seat in table if isinstance(seat, dict)]
    names += [event.text("node_id") for event in log.events if event.event == "joined"]
    return ((run_id, name) for name in names if run_id and name)
