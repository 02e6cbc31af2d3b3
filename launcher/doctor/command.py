"""`elaunch doctor`: can this node train, with the options of a job?"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TypeAlias

import click

from elaunch import __version__
from elaunch.launcher.agent_config import count_workers, master_ports
from elaunch.launcher.doctor import devices, host, network
from elaunch.launcher.doctor.findings import (
    Finding,
    Grade,
    Needs,
    Probe,
    ProbeFailed,
    bad,
    from_json,
    ok,
    worst,
)
from elaunch.launcher.errors import UsageError
from elaunch.launcher.host import as_started, detect
from elaunch.launcher.options.command_line import own
from elaunch.launcher.options.files import read_secret
from elaunch.launcher.options.options import JobCommand, Options, options_of
from elaunch.launcher.preflight import check_folder
from elaunch.launcher.schedulers.defaults import cluster_of, concerning, settle
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.store.locate import Planned, RendezvousPlan, plan
from elaunch.rendezvous.job_spec import ProgramKind
from elaunch.rendezvous.texts import node_host

SCHEMA = 1
# Stands for the program, if none is typed: options are complete without one here.
_NO_PROGRAM = "doctor"
_TORCH_S = 60.0
# Without persistence mode the driver takes seconds for each GPU.
_GPUS_S = 30.0
# For all others: each has its own deadlines, the store's 20 requests the longest.
_CHECKS_S = 30.0


Finish: TypeAlias = Callable[[], tuple[Finding, ...]]
# Begins a check in the main thread, and returns what finishes it in another thread.
Begin: TypeAlias = Callable[[], Finish]
# Each check with its findings, of which there is at least one.
Checked: TypeAlias = Mapping[str, tuple[Finding, ...]]


def checks_for(needs: Needs, plan: RendezvousPlan, environ: Mapping[str, str]) -> dict[str, Begin]:
    """All checks for a job, in the order in which they are shown."""
    return {
        "torch": lambda: _torch(needs, environ),
        "gpus": lambda: _gpus(needs, environ),
        "rdma": lambda: devices.check_rdma,
        "address": lambda: partial(network.check_address, plan, needs),
        "ports": lambda: partial(network.check_ports, plan, needs),
        "store": lambda: partial(network.check_store, plan),
        "shm": lambda: partial(host.check_shm, needs),
        "limits": lambda: partial(host.check_limits, needs),
    }


def _torch(needs: Needs, environ: Mapping[str, str]) -> Finish:
    if not needs.uses_python:
        return lambda: (ok("the program is a command: torch was not tried"),)
    gpus = devices.usable_gpus(environ)
    try:
        probe = Probe((needs.interpreter, "-c", devices.LOOK, str(gpus)), _TORCH_S, environ)
    except OSError as error:
        trouble = devices.no_torch(needs.interpreter, error.strerror or str(error))
        return lambda: (trouble,)

    def finish() -> tuple[Finding, ...]:
        try:
            return devices.judge_torch(probe.answer(), gpus)
        except (ProbeFailed, ValueError, KeyError, TypeError) as error:
            return (devices.no_torch(needs.interpreter, str(error)),)

    return finish


def _gpus(needs: Needs, environ: Mapping[str, str]) -> Finish:
    probe = devices.gpus_probe(needs, _GPUS_S, environ)
    return lambda: from_json(probe.answer())


def examine(checks: Mapping[str, Begin], limit_s: float = _TORCH_S + _CHECKS_S) -> Checked:
    """Run the checks side by side. One that fails or hangs gets a finding that says so."""
    late = bad(f"no answer within {limit_s:g} s", "something hangs: see to that device, disk or server")
    found: dict[str, tuple[Finding, ...]] = dict.fromkeys(checks, (late,))

    def run(name: str, finish: Finish) -> None:
        try:
            found[name] = finish()
        except ProbeFailed as error:
            found[name] = (bad(str(error), "something hangs: see to that device or its driver"),)
        except Exception as error:
            # A fault in one check must not hide the others.
            why = f"the check failed ({type(error).__name__}: {error})"
            found[name] = (bad(why, "please report this, with the output of elaunch doctor --json"),)

    until_s = time.monotonic() + limit_s
    threads = [threading.Thread(target=run, args=(name, begin()), daemon=True) for name, begin in checks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))
    return dict(found)


def _grade(findings: Iterable[Finding]) -> Grade:
    return worst(each.grade for each in findings)


def _main(ctx: click.Context) -> int:
    """Run all checks and show what they have found. Returns the exit code. Raises UsageError."""
    environ = as_started(ctx.obj.environ)
    options = options_of(ctx, (_NO_PROGRAM,))
    cluster = cluster_of(options, environ)
    if cluster and cluster.task > 0:
        # Of several tasks on a node, one is enough.
        return 0
    check_folder()
    start_s = time.monotonic()
    needs, planned = needed(options, environ, cluster)
    checked = examine(checks_for(needs, planned.plan, environ))
    show = as_json if ctx.params["json"] else lines
    print("\n".join(show(checked, node_host(socket.gethostname()), time.monotonic() - start_s)))
    return 1 if _grade(chain(*checked.values())) is Grade.BAD else 0


COMMAND = JobCommand(
    "doctor",
    _main,
    [own("json", "", "one JSON object in one line, for machines")],
    usage=["[--json] [options of a job] [script.py args…]"],
    about="""Check this node: can it train? torch and CUDA, GPUs, RDMA, addresses, ports, the job's store,
/dev/shm, limits. Every line that is not ok has the way out.

With the options of a job (--nnodes, --rdzv-endpoint, --token-file, --nproc-per-node, …) it checks
what that job needs; nothing is started, and nothing is written to the store.""",
    ending="""On all nodes of a Slurm job: srun --ntasks-per-node=1 elaunch doctor
Exit codes: 0 nothing is bad, 1 something is bad, 2 the command line is wrong.""",
)


def needed(options: Options, environ: Mapping[str, str], cluster: Cluster | None) -> tuple[Needs, Planned]:
    """What a job with these options needs of this node, and the plan of its rendezvous. Raises UsageError."""
    if cluster:
        cluster = concerning(options, cluster, environ)
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
            wants_gpus=options.nproc_per_node == "gpu",
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
        Grade.WARN: "this node can train; see to what is marked warn",
        Grade.BAD: "this node cannot train as asked",
    }[worst(counts)]
    yield f"{hostname}: {conclusion} ({', '.join(parts)}; {took_s:.1f} s)"


def as_json(checked: Checked, hostname: str, took_s: float) -> Iterator[str]:
    """One object in one line; docs/operations.md has its schema."""
    checks = [
        {
            "check": name,
            "grade": _grade(findings).value,
            "findings": [{"grade": each.grade.value, "found": each.found, "advice": each.advice} for each in findings],
        }
        for name, findings in checked.items()
    ]
    grade = _grade(chain(*checked.values())).value
    known = {"schema": SCHEMA, "elaunch": __version__, "host": hostname, "grade": grade, "seconds": round(took_s, 3)}
    yield json.dumps({**known, "checks": checks})
