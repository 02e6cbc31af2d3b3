"""`elaunch report`: reads a run's folder and writes its page, its numbers, its trace."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.command_line import Command, own
from elaunch.launcher.options.table import HELP
from elaunch.launcher.report_page import reading
from elaunch.launcher.report_page.ending import Look
from elaunch.launcher.report_page.goodput import goodput
from elaunch.launcher.report_page.history import History, NodeFolder, history, started_event
from elaunch.launcher.report_page.metrics import StepMetrics
from elaunch.launcher.report_page.page import (
    WARNINGS_MAX,
    LogLink,
    Page,
    link_to,
    make_page,
    open_warnings,
    printed,
    shown_causes,
    summary,
)
from elaunch.launcher.report_page.profiles import ShownProfile, read_profile
from elaunch.launcher.report_page.render import render
from elaunch.launcher.report_page.trace import trace
from elaunch.launcher.watch.local import local_agents
from elaunch.rendezvous.texts import node_host, plain

PAGE = "report.html"
_STDOUT = Path("-")
# Ranks of generations whose logs the page links to.
_LOGS_MAX = 1000
# Links to the stacks of one generation.
_STACKS_MAX = 8


@dataclass(frozen=True)
class ReportRequest:
    """What `elaunch report` is to read and to write; `page` is None for the default place."""

    folders: tuple[Path, ...]
    page: Path | None
    perfetto: Path | None
    is_json: bool
    metrics: Path | None


def _main(ctx: click.Context) -> int:
    """Make the report. Returns the exit code. Raises UsageError."""
    request = request_of(ctx.params)
    folders = tuple(dict.fromkeys(reading.find(folder) for folder in request.folders))
    job = reading.read_job(folders)
    metrics_path = request.metrics or next(
        (path for folder in job if (path := reading.metrics_path(started_event(folder)))), None
    )
    metrics = reading.read_metrics(metrics_path) if metrics_path else None
    if request.metrics and metrics is None:
        raise UsageError(f"report: --metrics {request.metrics} has no line with a step; give lines of JSON")
    past = history(job, metrics, _look(job))
    target = request.page or (None if request.is_json else folders[0] / PAGE)
    page = _page(past, metrics, metrics_path, (target or folders[0] / PAGE).absolute().parent)
    if request.perfetto:
        _write(request.perfetto, json.dumps(trace(past, page.goodput), separators=(",", ":")), "--perfetto")
    if target:
        template = Path(__file__).with_name("page.html").read_text()
        _write(target, render(page, template), "-o")
    if request.is_json:
        _print(json.dumps(summary(page), indent=1) + "\n")
    elif _STDOUT not in (target, request.perfetto):
        made = [str(path) for path in (target, request.perfetto) if path]
        # Each is one line: a timeline that somebody has changed adds none.
        _print("\n".join([*(plain(line, keep="\t") for line in printed(page)), *made, ""]))
    return 0


COMMAND = Command(
    "report",
    _main,
    [
        own("output", "FILE", "write the page there [report.html in the run's folder]", short="o"),
        own("perfetto", "FILE", "write a trace of the same events, for ui.perfetto.dev and chrome://tracing"),
        own("json", "", "print the numbers as JSON, and write a page only with -o"),
        own("metrics", "FILE", "lines of JSON with step, loss and seconds [those of elaunch.trainer's --out]"),
        click.Argument(["folders"], nargs=-1, type=click.Path(path_type=Path)),
        HELP,
    ],
    usage=["[-o FILE] [--perfetto FILE] [--json] [--metrics FILE] DIR…"],
    about="""Show what happened in a run: one HTML page from the folder that it left in --log-dir.

DIR is the run's folder, or the --log-dir itself for its newest run; folders of the job's other nodes
are found beside it, or given too.""",
    ending="""The page needs no network and no other file. It shows what failed and why, each rank's timeline,
where the time went (ETTR), curves of loss and step time, and links to the logs.""",
)


def request_of(params: Mapping[str, Any]) -> ReportRequest:
    """The request of a command line. Raises UsageError."""
    if not params["folders"]:
        raise UsageError("report: no folder is given; give a run's folder below --log-dir, or the --log-dir itself")
    page, perfetto, metrics = (
        Path(word) if (word := params[name]) else None for name in ("output", "perfetto", "metrics")
    )
    if (page, perfetto).count(_STDOUT) + params["json"] > 1:
        raise UsageError("report: of -o -, --perfetto - and --json only one can have stdout; give the others files")
    return ReportRequest(params["folders"], page, perfetto, params["json"], metrics)


def _look(job: Sequence[NodeFolder]) -> Look:
    """The time, and the agents of this host, which are asked only if one of the job may still run here."""
    host = node_host(socket.gethostname())
    open_here = [
        Path(folder.path)
        for folder in job
        if (started := started_event(folder)) and started.text("host") == host and not reading.has_ended(folder)
    ]
    if not open_here:
        return Look(time.time(), "", frozenset())
    agents = frozenset((agent.job.run_id, agent.pid) for agent in local_agents().agents)
    can_see = os.geteuid() == 0 or all(reading.owner(folder) == os.geteuid() for folder in open_here)
    return Look(time.time(), host if can_see else "", agents)


def _page(past: History, metrics: StepMetrics | None, metrics_path: Path | None, beside: Path) -> Page:
    """The page, with links that are right for a page in the folder `beside`."""
    links: dict[tuple[str, int, int], tuple[LogLink, ...]] = {}
    for node in past.nodes:
        for files in reading.log_files(Path(node.folder), _LOGS_MAX // len(past.nodes)):
            found = tuple(link_to(path, os.path.relpath(path, beside)) for path in files.paths)
            links[node.folder, files.generation, files.rank] = found
    tails = {}
    for number in shown_causes(past):
        fault = past.faults[number]
        if fault.folder and fault.rank >= 0:
            # Of a large job not all ranks are in the list above; those that failed are needed.
            paths = reading.rank_files(Path(fault.folder), fault.generation, fault.rank)
            failed = tuple(link_to(path, os.path.relpath(path, beside)) for path in paths)
            links |= {(fault.folder, fault.generation, fault.rank): failed} if failed else {}
            log = (f"attempt_{fault.generation}", str(fault.rank), "stderr.log")
            if (tail := reading.tail(Path(fault.folder), log)) is not None:
                tails[number] = tail
    return make_page(
        past,
        goodput(past),
        metrics,
        links,
        tails,
        str(metrics_path or ""),
        _stacks(past, beside),
        _profiles(past, beside),
    )


def _profiles(past: History, beside: Path) -> list[tuple[ShownProfile, tuple[LogLink, ...]]]:
    """The profiles that the trainer left on any node, with links to their files."""
    found = []
    for node in past.nodes:
        for content, paths in reading.profiles(Path(node.folder)):
            if shown := read_profile(content):
                found.append((shown, tuple(link_to(path, os.path.relpath(path, beside)) for path in paths)))
    return sorted(found, key=lambda each: each[0].generation)


def _stacks(past: History, beside: Path) -> dict[int, tuple[LogLink, ...]]:
    """Links to the stacks that the nodes kept, of generations that failed or seemed to hang; the named rank's first."""
    faults = [past.faults[number] for number in shown_causes(past)]
    warnings = [warned for _, warned in open_warnings(past)[:WARNINGS_MAX]]
    homes = {warned.generation: warned.folder for warned in warnings}
    homes |= {fault.generation: fault.folder for fault in faults}
    found: dict[int, tuple[LogLink, ...]] = {}
    for generation, home in homes.items():
        links: list[LogLink] = []
        for node in sorted(past.nodes, key=lambda node: node.folder != home):
            if len(links) < _STACKS_MAX and (path := reading.stacks_file(Path(node.folder), generation)):
                name = f"{reading.STACKS} of {node.name}" if len(past.nodes) > 1 else reading.STACKS
                links.append(LogLink(name, link_to(path, os.path.relpath(path, beside)).href))
        found[generation] = tuple(links)
    return found


def _print(text: str) -> None:
    """Write to stdout; a reader that has closed it (`| head`) has seen what it wanted."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _write(path: Path, text: str, option: str) -> None:
    """Write a file as a whole, or not at all; `-` is stdout. Raises UsageError."""
    if path == _STDOUT:
        _print(text)
        return
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        if not path.is_file() and path.exists():
            # /dev/null or a pipe: root could replace it by a file.
            path.write_text(text, encoding="utf-8")
            return
        # As log files, whose content it has: open to the user and the group at most. In a folder of another user
        # nothing that is there already is written to.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"report: {path} cannot be written ({error.strerror}); give another with {option}") from None
