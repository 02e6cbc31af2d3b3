"""`elaunch report`: what happened in a run, as one HTML page, text and JSON, from the folder in its --log-dir."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import quote

import click

from elaunch.launcher.errors import UsageError
from elaunch.launcher.inspect import run_folder
from elaunch.launcher.inspect.goodput import goodput
from elaunch.launcher.inspect.history import Incident, PastGeneration, history
from elaunch.launcher.inspect.node_log import NodeLog
from elaunch.launcher.inspect.page import Links, Report, StepMetrics, render
from elaunch.launcher.inspect.text import cut, offset, sentence
from elaunch.launcher.options.command_line import Command, own
from elaunch.rendezvous.format import plain

PAGE = "report.html"
# Links to the stacks of one generation.
_STACKS_MAX = 8
# The newest failures and warnings are printed.
PRINTED_MAX = 10


def _main(ctx: click.Context) -> int:
    """Make the report. Returns the exit code. Raises UsageError."""
    given, is_json = ctx.params["folders"], ctx.params["json"]
    if not given:
        raise UsageError("report: no folder is given; give a run's folder below --log-dir, or the --log-dir itself")
    page, metrics_path = (Path(word) if (word := ctx.params[name]) else None for name in ("output", "metrics"))
    folders = tuple(dict.fromkeys(run_folder.find(folder) for folder in given))
    job = run_folder.read_job(folders)
    target = page or (None if is_json else folders[0] / PAGE)
    report = read_report(job, metrics_path, (target or folders[0] / PAGE).absolute().parent)
    if target:
        _write(target, render(report, Path(__file__).with_name("page.html").read_text()))
    if is_json:
        click.echo(json.dumps(summary(report), indent=1))
    else:
        # Each is one line: a timeline that somebody has changed adds none.
        click.echo("\n".join([*(plain(line) for line in printed(report)), str(target)]))
    return 0


COMMAND = Command(
    "report",
    _main,
    [
        own("output", "FILE", "write the page there [report.html in the run's folder]", short="o"),
        own("json", "", "print the numbers as JSON, and write a page only with -o"),
        own("metrics", "FILE", "lines of JSON with step, loss and seconds [those of elaunch.trainer's --out]"),
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
    """The report of a job, with links that are right for a page in the folder `beside`. Raises UsageError."""
    found = metrics_path or next((path for each in job if (path := run_folder.metrics_path(each.started))), None)
    metrics = StepMetrics(run_folder.lines_of(found)) if found else None
    if metrics_path and not (metrics and metrics.steps):
        raise UsageError(f"report: --metrics {metrics_path} has no line with a step; give lines of JSON")
    past = history(job)
    report = Report(past, goodput(past), metrics, str(found or ""))
    links, stacks = {}, {}
    for shown in (*report.causes, *past.warned):
        if shown.is_cause and shown.folder and shown.rank >= 0:
            place = Path(shown.folder, f"attempt_{shown.generation}", str(shown.rank))
            files = [(name, place / name) for name in ("stderr.log", "stdout.log", "error.json")]
            links[shown] = _links(files, beside)
        # The named rank's node first.
        nodes = sorted(past.nodes, key=lambda node: node.folder != shown.folder)
        name = run_folder.STACKS
        places = [(f"{name} of {n.name}", Path(n.folder, f"attempt_{shown.generation}", name)) for n in nodes]
        stacks[shown.generation] = _links(places, beside)[:_STACKS_MAX]
    return replace(report, links=links, stacks=stacks)


def _links(files: Sequence[tuple[str, Path]], beside: Path) -> Links:
    """Names of files with content, and their addresses. Each byte of a path that has a meaning in one is quoted."""
    return tuple(
        (name, quote(os.path.relpath(path, beside), errors="surrogateescape"))
        for name, path in files
        if run_folder.has_content(path)
    )


def printed(report: Report) -> list[str]:
    """The report as text: the headline, then the newest failures and warnings with what came after."""
    causes = [fault for fault in report.history.faults if fault.is_cause]
    shown = sorted([*causes, *report.history.warned], key=lambda each: each.at_s)
    lines = [
        f"  {offset(each.at_s)}  {sentence(cut(each.sentence, 400))} {report.after(each)}".rstrip()
        for each in shown[-PRINTED_MAX:]
    ]
    left_out = len(shown) - len(lines)
    more = [f"  {left_out} earlier failures and warnings are left out; --json has all"] if left_out else []
    return [report.headline, *more, *lines]


def summary(report: Report) -> dict[str, object]:
    """The numbers for programs (`--json`). What is not known is null."""
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
    """Its fields; times are seconds from the start of the job."""
    return {name: _known(value) for name, value in asdict(item).items()}


def _known(value: object) -> object:
    """The value; None for a time or a number that is not known."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return None if value == -1 else value


def _write(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all. Raises UsageError."""
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        # As log files, whose content it has: open to the user and the group at most. In a folder of another user
        # nothing that is there already is written to.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"report: {path} cannot be written ({error.strerror}); give another with -o") from None
