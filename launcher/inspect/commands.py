"""The commands `stop`, `restart` and `stacks` for one running job, and `warm`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from elaunch.agent.diagnosis.stack_groups import full_text, group_text, grouped, location_text
from elaunch.agent.forkserver.client import Cold, connected, servers, stop
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.inspect.job_source import JobSource, LocalSource, NodeStacks, StoreSource, local_jobs
from elaunch.launcher.options.command_line import Command, Option, Source
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.preflight import read_secret
from elaunch.launcher.store.locate import given_addresses, plan
from elaunch.rendezvous.format import plain, plural
from elaunch.rendezvous.rules.queries import Topic
from elaunch.rendezvous.types import UNNAMED, job_name

# Incremented when a field of `--json` changes its meaning or is removed, not when one is added.
VERSION = 1
JSON = Option("json", "", "one JSON object, for scripts")
RANKS = Option("ranks", "", "a line for each rank, however many there are")
# The options that name a job's store, and the job.
_STORE_OPTIONS = ("rdzv_endpoint", "rdzv_backend", "rdzv_conf", "run_id", "token_file", "config", "master_addr")
_WHERE = """\
Without options it finds the jobs of this user on this host (as root: of all users).
JOB is a run id, or the pid of the job's elaunch.
From another host, name the store as the job's nodes do; variables count too:

  --rdzv-endpoint HOST:PORT  the job's store; ELAUNCH_ENDPOINT
  --run-id ID                the job's name, instead of JOB
  --token-file FILE          the job's token; ELAUNCH_TOKEN
  --rdzv-conf K=V,…          as for the job: certificates, user, etcd_prefix
  --rdzv-backend NAME        as for the job
  --config FILE              a job file that has these options

Exit codes: 0 it was done, 2 the command line is wrong, 3 no such job runs, its store cannot
be reached, or the order was refused."""
_NO_SERVER = "no warm fork server runs; elaunch --warm script.py leaves one"

Work = Callable[[click.Context, JobSource], int]


def job_command(name: str, options: Sequence[Option], about: str, work: Work, *, is_order: bool = False) -> Command:
    """A command about one job: `work` gets the job's source. Orders need the job's name."""
    usage = " ".join(["JOB" if is_order else "[JOB]", *(f"[--{option.long}]" for option in options)])
    of_store = [option for option in TABLE if option.name in _STORE_OPTIONS]
    job = click.Argument(["jobs"], nargs=-1)
    run = partial(_run, work, is_order)
    return Command(name, run, [*options, *of_store, job], usage=[usage], about=about, ending=_WHERE)


def _run(work: Work, is_order: bool, ctx: click.Context) -> int:
    """Find the job and do the work. Returns the exit code. Raises UsageError and SiteError."""
    with closing(_find(ctx, is_order=is_order)) as source:
        return work(ctx, source)


def _find(ctx: click.Context, *, is_order: bool) -> JobSource:
    """The job that a command line names. Options about the store have the same meaning as for a job.

    Raises UsageError and SiteError.
    """
    command, jobs, environ = str(ctx.command.name), ctx.params["jobs"], ctx.obj.environ
    if len(jobs) > 1:
        raise UsageError(
            f"{command} takes one job, and {' '.join(jobs)} are {len(jobs)}; start a script called {command} with"
            f" elaunch ./{command}"
        )
    given = ctx.obj.given.items()
    typed = {each: g.raw for each, g in given if g.source is Source.COMMAND_LINE and each in _STORE_OPTIONS}
    # Parsed for several nodes: a job on one node has no store. The program is never run.
    argv = [f"--{each.replace('_', '-')}={raw}" for each, raw in typed.items()]
    options = parse([*argv, "--nnodes=2", "--", command], environ)
    run_id = options.run_id or "" if "run_id" in typed else ""
    name = jobs[0] if jobs else run_id
    if run_id and name != run_id:
        raise UsageError(f"{command} {name} contradicts --run-id {run_id}; drop one of them")
    if {"rdzv_endpoint", "master_addr"} & typed.keys():
        return _by_store(options, name, environ)
    here, problems = local_jobs()
    listed = ", ".join(f"{plain(job.job.run_id)} (pid {job.pid})" for job, *_ in here)
    if is_order and not name:
        # The only job here may not be the intended one.
        raise UsageError(
            f"{command} needs the job's name or the pid of its elaunch; these run here: {listed or 'none'}"
        )
    by_name = [job for job in here if job[0].job.run_id == name]
    by_pid = [job for job in here if name in (str(agent.pid) for agent in job)]
    chosen = (by_name or by_pid) if name else here
    backend = options.rdzv_backend if "rdzv_backend" in options.given else ""
    if not chosen and not given_addresses(options, environ, backend)[0]:
        which = f"no job {plain(name)}" if name else "no job of yours"
        elsewhere = "for a job on other hosts name its store: --rdzv-endpoint HOST:PORT"
        parts = [f"these run: {listed}" if listed else elsewhere, *map(plain, problems)]
        raise SiteError(f"{which} runs on this host; {'; '.join(parts)}")
    # Agents that gave no response may belong to this job too.
    for problem in problems:
        print(f"elaunch: {plain(problem)}", file=sys.stderr)
    if len(chosen) > 1:
        raise UsageError(f"several jobs run here: {listed}; name one by its pid: elaunch {command} PID")
    return LocalSource(chosen[0]) if chosen else _by_store(options, name, environ)


def _by_store(options: Options, name: str, environ: Mapping[str, str]) -> JobSource:
    made = plan(options, environ, read_secret).plan
    if made.is_alone:
        raise UsageError("a job with --standalone has no store: run this on its own host, without PET_STANDALONE")
    return StoreSource(made, name or options.run_id or UNNAMED)


def _order(topic: Topic, ctx: click.Context, source: JobSource) -> int:
    response = source.order(topic)
    if not response.is_done:
        raise SiteError(f"{ctx.command.name}: {plain(response.text)}")
    print(f"elaunch: {plain(response.text)}")
    return 0


STOP = job_command(
    "stop",
    [],
    """End a running job on all nodes: its workers get SIGTERM and have the time of --stop-grace to save. The
job's exit code is 130, as after Ctrl-C. To end one node's part only, send SIGTERM to its elaunch.""",
    partial(_order, Topic.STOP),
    is_order=True,
)
RESTART = job_command(
    "restart",
    [],
    """Stop the workers of a running job on all nodes, and start them again, as after a failure: for a job that
hangs. It does not count towards --max-restarts.""",
    partial(_order, Topic.RESTART),
    is_order=True,
)


def _stacks(ctx: click.Context, source: JobSource) -> int:
    taken = source.stacks()
    sys.stdout.write(json.dumps(stacks_record(taken)) + "\n" if ctx.params["json"] else stacks_text(taken))
    return 0


STACKS = job_command(
    "stacks",
    [JSON],
    """Show where every rank of a running job is: the stacks of all workers on all nodes, equal ones together.
py-spy reads them from outside; the workers continue.""",
    _stacks,
)


def stacks_text(taken: NodeStacks) -> str:
    """The text of `elaunch stacks`: a line for each group, then the groups' stacks in full."""
    groups = grouped(taken.stacks)
    what = f"{plural(len(taken.stacks), 'rank')} at {'the same place' if len(groups) == 1 else f'{len(groups)} places'}"
    lines = [f"{job_name(taken.run_id)}: {what if groups else 'no worker runs now'}"]
    lines += [f"  {group_text(group)}" for group in groups]
    lines += [*taken.silent, *taken.notes]
    lines += ["", *full_text(taken.stacks).splitlines()] if groups else []
    return "".join(f"{plain(line)}\n" for line in lines)


def stacks_record(taken: NodeStacks) -> dict[str, Any]:
    """The object of `--json`; `$defs/stacks` of docs/status.schema.json describes it."""
    groups = []
    for group in grouped(taken.stacks):
        stack = asdict(group.stack)
        del stack["rank"]
        groups.append({"ranks": list(group.ranks), "where": location_text(group.stack), "stack": stack})
    return {
        "version": VERSION,
        "run_id": taken.run_id,
        "groups": groups,
        "silent": list(taken.silent),
        "notes": list(taken.notes),
    }


def _warm(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises SiteError."""
    try:
        paths = servers()
        if ctx.params["stop"]:
            ended = [path for path in paths if stop(path)]
            print(f"ended: {len(ended)} fork server{'s' * (len(ended) != 1)}" if ended else _NO_SERVER)
            return 0
    except Cold as error:
        if str(error):
            raise SiteError(str(error)) from error
        paths = []
    texts, code = list[str](), 0
    for path in paths:
        try:
            with connected(path) as (_, known):
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(known["since"]))
                texts += [
                    f"pid {known['pid']}, since {since}, {max(known['seconds_left'], 0) / 60:.1f} min left",
                    f"  for {known['program']} in {known['folder']}, with {known['python']}",
                    f"  imported: {', '.join(known['packages'])}",
                    f"  socket: {path}",
                ]
        except Cold as error:
            texts.append(str(error) or "it has ended")
            code = 3
    print("\n".join(texts) or _NO_SERVER)
    return code


WARM = Command(
    "warm",
    _warm,
    [Option("stop", "", "end these fork servers")],
    usage=["[--stop]"],
    about="Show this user's fork servers. They stay when a job with --warm has ended: the next start needs no import.",
    ending="Exit codes: 0 done, 2 the command line is wrong, 3 a fork server cannot be reached or ended.",
)
