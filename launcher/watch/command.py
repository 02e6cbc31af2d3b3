"""`elaunch status`, `top`, `stacks`, `stop` and `restart`: reads the command line, and finds the job that is meant."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.options.command_line import Command, Option, Source, own
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.options.secret_file import read_secret
from elaunch.launcher.options.table import HELP, TABLE
from elaunch.launcher.store.locate import RendezvousPlan, given_addresses, plan
from elaunch.launcher.watch.local import Found, LocalAgent, local_agents, user_name
from elaunch.launcher.watch.record import VERSION, status_record
from elaunch.launcher.watch.source import JobSource, LocalSource, StoreSource
from elaunch.launcher.watch.words import span, text_of
from elaunch.rendezvous.job_spec import UNNAMED
from elaunch.rendezvous.rules.questions import Topic
from elaunch.rendezvous.texts import plain


@dataclass(frozen=True)
class LookRequest:
    """One call: the job by name or part of it, and the options about the store, typed or not."""

    name: str
    job: str
    options: Options
    has_typed_store: bool
    is_json: bool = False
    every_rank: bool = False


def _main(ctx: click.Context) -> int:
    """Run the command. Returns the exit code. Raises UsageError and SiteError."""
    request = request_of(ctx)
    found = find(request, ctx.obj.environ)
    if isinstance(found, str):
        print(found, end="")
        return 0
    try:
        return _COMMANDS[request.name](request, found)
    except KeyboardInterrupt:
        return 130
    finally:
        found.close()


def request_of(ctx: click.Context) -> LookRequest:
    """The request of a command line. Options about the store mean what they mean for a job. Raises UsageError."""
    name, jobs = str(ctx.command.name), ctx.params["jobs"]
    if len(jobs) > 1:
        raise UsageError(
            f"{name} takes one job, and {' '.join(jobs)} are {len(jobs)} words; start a script called {name} with"
            f" elaunch ./{name}"
        )
    typed = {each: given.raw for each, given in ctx.obj.given.items() if given.source is Source.COMMAND_LINE}
    typed = {each: raw for each, raw in typed.items() if each in _STORE_OPTIONS}
    # As a node of several: the job on one node has no store. The program is never run.
    words = [f"--{each.replace('_', '-')}={raw}" for each, raw in typed.items()]
    asked = parse([*words, "--nnodes=2", "--", name], ctx.obj.environ)
    job = jobs[0] if jobs else ""
    run_id = asked.run_id or "" if "run_id" in typed else ""
    if job and run_id and job != run_id:
        raise UsageError(f"{name} {job} contradicts --run-id {run_id}; drop one of them")
    return LookRequest(
        name,
        job or run_id,
        asked,
        bool({"rdzv_endpoint", "master_addr"} & typed.keys()),
        ctx.params.get("json", False),
        ctx.params.get("ranks", False),
    )


def find(request: LookRequest, environ: Mapping[str, str]) -> JobSource | str:
    """The job that is meant; or, if there are several, the text that lists them. Raises UsageError and SiteError."""
    if request.has_typed_store:
        return _by_store(request, environ)
    found = local_agents()
    if request.name in _ORDERS and not request.job:
        # The only job here may be another one than is meant.
        these = ", ".join(_call(run_id, group) for (run_id, _), group in _jobs(found.agents).items())
        here = f"; these run here: {these}" if these else "; none runs here"
        raise UsageError(f"{request.name} needs the job's name or the pid of its elaunch{here}")
    jobs = _named(request, _jobs(found.agents)) if request.job else _jobs(found.agents)
    if len(jobs) == 1:
        # Those that are silent may be of this job, too.
        _tell(found.silent if request.job else (*found.silent, *found.troubles))
        return LocalSource(next(iter(jobs.values())))
    if not jobs:
        if _has_endpoint(request.options, environ):
            _tell((*found.silent, *found.troubles))
            return _by_store(request, environ)
        raise SiteError(_nothing_found(request, found))
    if request.name != "status":
        pids = ", ".join(f"{_call(run_id, group)} (pid {group[0].pid})" for (run_id, _), group in jobs.items())
        raise UsageError(f"several jobs run here: {pids}; name one by its pid: elaunch {request.name} PID")
    return _list(jobs, (*found.silent, *found.troubles), is_json=request.is_json)


_Jobs = Mapping[tuple[str, str], Sequence[LocalAgent]]


def _named(request: LookRequest, jobs: _Jobs) -> _Jobs:
    """The jobs with that run id; else those with an agent of that pid; else, to be shown, those that begin so."""
    name = request.job
    return (
        {key: group for key, group in jobs.items() if key[0] == name}
        or {key: group for key, group in jobs.items() if name in (str(agent.pid) for agent in group)}
        # A job that runs is not ended for half a name.
        or {key: group for key, group in jobs.items() if request.name not in _ORDERS and key[0].startswith(name)}
    )


def _call(run_id: str, agents: Sequence[LocalAgent]) -> str:
    """What a user types for that job; a job without a name is called by the pid of its elaunch."""
    return str(agents[0].pid) if run_id == UNNAMED else plain(run_id)


def _tell(troubles: Sequence[str]) -> None:
    """Say what was found beside the answer. Not on stdout, which may be JSON."""
    for trouble in troubles:
        print(f"elaunch: {plain(trouble)}", file=sys.stderr)


def _has_endpoint(options: Options, environ: Mapping[str, str]) -> bool:
    return bool(given_addresses(options, environ, options.rdzv_backend if "rdzv_backend" in options.given else "")[0])


def _by_store(request: LookRequest, environ: Mapping[str, str]) -> JobSource:
    made = store_plan(request.options, environ)
    return StoreSource(made, request.job or request.options.run_id or UNNAMED)


def store_plan(options: Options, environ: Mapping[str, str]) -> RendezvousPlan:
    """Where the job's store is, and what is shown to it. Raises UsageError."""
    made = plan(options, environ, read_secret).plan
    if made.is_alone:
        raise UsageError("a job with --standalone has no store: ask on its own host, without PET_STANDALONE")
    return made


def _jobs(agents: Sequence[LocalAgent]) -> dict[tuple[str, str], list[LocalAgent]]:
    """The agents by job. Two jobs may have one run id: their leaders differ."""
    jobs: dict[tuple[str, str], list[LocalAgent]] = {}
    for agent in agents:
        jobs.setdefault((agent.job.run_id, agent.job.leader), []).append(agent)
    return jobs


def _nothing_found(request: LookRequest, found: Found) -> str:
    which = f"no job {plain(request.job)}" if request.job else "no job of yours"
    why = "".join(f"; {plain(trouble)}" for trouble in (*found.silent, *found.troubles))
    if found.others:
        users = [user_name(uid) for uid in found.others[:3]] + (["others"] if found.others[3:] else [])
        why += f"; jobs of {', '.join(users)} may run here, which only their users and root can see"
    if found.agents:
        names = ", ".join(_call(run_id, group) for (run_id, _), group in _jobs(found.agents).items())
        return f"{which} runs on this host; these run: {names}{why}"
    return f"{which} runs on this host{why}; for a job of other hosts name its store: --rdzv-endpoint HOST:PORT"


def _list(jobs: _Jobs, troubles: Sequence[str], *, is_json: bool) -> str:
    rows = [
        {
            "run_id": run_id,
            "state": agents[0].job.state.value,
            "command": agents[0].job.terms.command if agents[0].job.terms else "",
            "pids": [agent.pid for agent in agents],
            "since_s": round(max(agent.node.age_s for agent in agents), 1),
        }
        for (run_id, _), agents in jobs.items()
    ]
    if is_json:
        return json.dumps({"version": VERSION, "jobs": rows}) + "\n"
    lines = [f"{len(rows)} jobs run here; elaunch status JOB shows one:"]
    lines += [
        plain(f"  {_call(run_id, agents)}  {row['state']} for {span(float(str(row['since_s'])))}  {row['command']}")
        for ((run_id, _), agents), row in zip(jobs.items(), rows, strict=True)
    ]
    return "\n".join([*lines, *map(plain, troubles)]) + "\n"


def _status(request: LookRequest, source: JobSource) -> int:
    record = status_record(source.take(), time.time())
    if request.is_json:
        print(json.dumps(record))
    else:
        sys.stdout.write(text_of(record, every_rank=request.every_rank))
    return 0


def _top(request: LookRequest, source: JobSource) -> int:
    try:
        from elaunch.launcher.watch.top import watch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise SiteError("elaunch top needs rich: python -m pip install -U rich; elaunch status needs it not") from None
    return watch(source, every_rank=request.every_rank)


def _stacks(request: LookRequest, source: JobSource) -> int:
    from elaunch.launcher.watch.stacks import stacks_record, stacks_text

    taken = source.stacks()
    if request.is_json:
        print(json.dumps(stacks_record(taken)))
    else:
        sys.stdout.write(stacks_text(taken))
    return 0


def _order(request: LookRequest, source: JobSource) -> int:
    answer = source.order(_ORDERS[request.name])
    if not answer.is_done:
        raise SiteError(f"{request.name}: {plain(answer.text)}")
    print(f"elaunch: {plain(answer.text)}")
    return 0


_ORDERS = {"stop": Topic.STOP, "restart": Topic.RESTART}
_COMMANDS = {"status": _status, "top": _top, "stacks": _stacks, **dict.fromkeys(_ORDERS, _order)}


_JSON = own("json", "", "one JSON object, for scripts")
_RANKS = own("ranks", "", "a line for each rank, however many there are")
# Of elaunch's options those that say where a job's store is, and which job.
_STORE_OPTIONS = ("rdzv_endpoint", "rdzv_backend", "rdzv_conf", "run_id", "token_file", "config", "master_addr")
_WHERE = """\
Without options it finds the jobs of this user on this host (as root: of all users).
JOB is {}.
From another host, name the store as the job's nodes do; variables count too:

  --rdzv-endpoint HOST:PORT  the job's store; ELAUNCH_ENDPOINT
  --run-id ID                the job's name, instead of JOB
  --token-file FILE          the job's token; ELAUNCH_TOKEN
  --rdzv-conf K=V,…          as for the job: certificates, user, etcd_prefix
  --rdzv-backend NAME        as for the job
  --config FILE              a job file that has these options

Exit codes: 0 {}, 2 the command line is wrong, 3 {}."""
_LOOKS = _WHERE.format(
    "a run id, or how it begins, or the pid of the job's elaunch",
    "it was shown",
    "no such job runs, or its store cannot be reached",
)
_ORDERED = _WHERE.format(
    "a whole run id, or the pid of the job's elaunch",
    "the order was accepted",
    "no such job runs, its\nstore cannot be reached, or the order was refused",
)


def _command(name: str, own: list[Option], about: str, where: str = _LOOKS) -> Command:
    usage = " ".join(["JOB" if where is _ORDERED else "[JOB]", *(f"[--{option.long}]" for option in own)])
    of_store = [option for option in TABLE if option.name in _STORE_OPTIONS]
    job = click.Argument(["jobs"], nargs=-1)
    return Command(name, _main, [*own, *of_store, job, HELP], usage=[usage], about=about, ending=where)


STATUS = _command(
    "status",
    [_JSON, _RANKS],
    "Show how a running job is doing: nodes, ranks, generation, step, step time, last failure, restarts left.",
)
TOP = _command(
    "top",
    [_RANKS],
    """Show how a running job is doing, refreshed each second. q or Ctrl-C ends the view, not the job.
If stdout is no terminal, it prints one line each second, until the job ends.""",
)
STACKS = _command(
    "stacks",
    [_JSON],
    """Show where every rank of a running job is: the stacks of all workers on all nodes, equal ones together.
py-spy reads them from outside; the workers go on.""",
)
STOP = _command(
    "stop",
    [],
    """End a running job on all nodes: its workers get SIGTERM and have the time of --stop-grace to save. The
job's exit code is 130, as after Ctrl-C. To end one node's part only, send SIGTERM to its elaunch.""",
    _ORDERED,
)
RESTART = _command(
    "restart",
    [],
    """Stop the workers of a running job on all nodes, and start them again, as after a failure: for a job that
hangs. It is not counted to --max-restarts.""",
    _ORDERED,
)
