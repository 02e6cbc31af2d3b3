"""`elaunch doctor`: can this node train, with the options of a job?"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TypeAlias

import click

from elaunch import __version__
from elaunch.agent.linux import in_threads
from elaunch.launcher.agent_config import count_workers, master_ports
from elaunch.launcher.doctor import host, network
from elaunch.launcher.doctor.host import Finding, Grade, Needs, bad, worst
from elaunch.launcher.errors import UsageError
from elaunch.launcher.host import detect, environ_at_start
from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.options import JobCommand, Options, options_of
from elaunch.launcher.preflight import check_folder, read_secret
from elaunch.launcher.schedulers.defaults import cluster_of, facts_of_job, settle
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.store.locate import Planned, RendezvousPlan, plan
from elaunch.rendezvous.format import node_host
from elaunch.rendezvous.types import ProgramKind

SCHEMA = 1
# A placeholder if no program is given: here options are complete without one.
_NO_PROGRAM = "doctor"
# Each check has its own deadlines: the import of torch the longest, then the store's 20 requests.
_LIMIT_S = host.TORCH_S + 30.0

Check: TypeAlias = Callable[[], Iterable[Finding]]
# Each check with its findings, of which there is at least one.
Checked: TypeAlias = Mapping[str, tuple[Finding, ...]]


def checks_for(needs: Needs, plan: RendezvousPlan, environ: Mapping[str, str]) -> dict[str, Check]:
    """All checks for a job, in the order in which they are shown."""
    return {
        "torch": partial(host.check_torch, environ, needs),
        "gpus": partial(host.check_gpus, environ, needs),
        "address": partial(network.check_address, plan, needs),
        "ports": partial(network.check_ports, plan, needs),
        "store": partial(network.check_store, plan),
        "shm": partial(host.check_shm, needs),
        "limits": partial(host.check_limits, needs),
    }


def examine(checks: Mapping[str, Check], limit_s: float = _LIMIT_S) -> Checked:
    """Run the checks in parallel. One that fails or hangs gets a finding about that."""
    late = bad(f"no answer within {limit_s:g} s", "it hangs: check that device, disk or server")

    def done(check: Check) -> tuple[Finding, ...]:
        try:
            return tuple(check())
        except Exception as error:
            # A fault in one check must not hide the others.
            why = f"the check failed ({type(error).__name__}: {error})"
            return (bad(why, "please report this, with the output of elaunch doctor --json"),)

    found = in_threads({name: partial(done, check) for name, check in checks.items()}, limit_s, "elaunch-doctor")
    return {name: found.get(name, (late,)) for name in checks}


def _main(ctx: click.Context) -> int:
    """Run all checks and show what they have found. Returns the exit code. Raises UsageError."""
    environ = environ_at_start(ctx.obj.environ)
    options = options_of(ctx, (_NO_PROGRAM,))
    cluster = cluster_of(options, environ)
    if cluster and cluster.task > 0:
        # One task of each node checks it.
        return 0
    check_folder()
    start_s = time.monotonic()
    needs, planned = needed(options, environ, cluster)
    checked = examine(checks_for(needs, planned.plan, environ))
    show = as_json if ctx.params["json"] else lines
    print("\n".join(show(checked, node_host(socket.gethostname()), time.monotonic() - start_s)))
    return 1 if worst(chain(*checked.values())) is Grade.BAD else 0


COMMAND = JobCommand(
    "doctor",
    _main,
    [Option("json", "", "one JSON object on one line, for machines")],
    usage=["[--json] [options of a job] [script.py args…]"],
    about="""Check this node: can it train? torch and CUDA, GPUs, addresses, ports, the job's store,
/dev/shm, limits. Every line that is not ok has the fix.

With the options of a job (--nnodes, --rdzv-endpoint, --token-file, --nproc-per-node, …) it checks
what that job needs; nothing is started, and nothing is written to the store.""",
    ending="""On all nodes of a Slurm job: srun --ntasks-per-node=1 elaunch doctor
Exit codes: 0 nothing is bad, 1 something is bad, 2 the command line is wrong.""",
)


def needed(options: Options, environ: Mapping[str, str], cluster: Cluster | None) -> tuple[Needs, Planned]:
    """What a job with these options needs of this node, and the plan of its rendezvous. Raises UsageError."""
    if cluster:
        cluster = facts_of_job(options, cluster, environ)
        options = settle(options, cluster)
    planned = plan(options, environ, read_secret, cluster)
    resources = detect(environ)
    workers = 1
    with suppress(UsageError):
        workers, _ = count_workers(options.nproc_per_node, resources, cluster)
    return (
        Needs(
            workers=workers,
            nodes_max=1 if planned.plan.is_alone else options.nnodes[1],
            ports=master_ports(options, planned),
            interpreter=environ.get("PYTHON_EXEC") or resources.python,
            uses_python=options.kind is not ProgramKind.COMMAND,
            needs_gpus=options.nproc_per_node == "gpu",
        ),
        planned,
    )


def lines(checked: Checked, hostname: str, took_s: float) -> Iterator[str]:
    """A line for each finding; the host's name is first, so that the output of many nodes can be sorted."""
    for name, findings in checked.items():
        for each in findings:
            advice = f" -> {each.advice}" if each.advice else ""
            yield f"{hostname}: {each.grade.value:4} {name:7} {each.found}{advice}"
    counts = Counter(each.grade for each in chain(*checked.values()))
    parts = [f"{counts[grade]} {grade.value}" for grade in Grade if counts[grade]]
    conclusion = {
        Grade.OK: "this node can train",
        Grade.WARN: "this node can train; check what is marked warn",
        Grade.BAD: "this node cannot train as asked",
    }[worst(chain(*checked.values()))]
    yield f"{hostname}: {conclusion} ({', '.join(parts)}; {took_s:.1f} s)"


def as_json(checked: Checked, hostname: str, took_s: float) -> Iterator[str]:
    """One object on one line; docs/operations.md has its schema."""
    checks = [
        {"check": name, "grade": worst(findings), "findings": [*map(asdict, findings)]}
        for name, findings in checked.items()
    ]
    known = {"schema": SCHEMA, "elaunch": __version__, "host": hostname, "grade": worst(chain(*checked.values()))}
    yield json.dumps({**known, "seconds": round(took_s, 3), "checks": checks})
