"""`elaunch doctor`: can this node train, with the options of a job?"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
    python,
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
Begin: TypeAlias = Callable[[], Finish]


@dataclass(frozen=True)
class Check:
    """One check. `question` is what it answers; each finding that is not ok has the way out.

    `begin` is called in the main thread, and returns what finishes the check in another thread.
    """

    name: str
    question: str
    begin: Begin


@dataclass(frozen=True)
class Checked:
    """A check with its findings, of which there is at least one."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def grade(self) -> Grade:
        return worst(finding.grade for finding in self.findings)


def checks_for(needs: Needs, plan: RendezvousPlan, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """All checks for a job, in the order in which they are shown."""

    def here(
        find: Callable[..., tuple[Finding, ...]], *args: object
    ) -> Callable[[], Callable[[], tuple[Finding, ...]]]:
        return lambda: partial(find, *args)

    return (
        Check("torch", "does torch start, with CUDA where there are GPUs?", lambda: _torch(needs, environ)),
        Check("gpus", "does the driver answer, and is each GPU sound and free?", lambda: _gpus(needs, environ)),
        Check("rdma", "does NCCL find its fast interface?", here(devices.check_rdma, needs)),
        Check("address", "where do other nodes and gloo find this one?", here(network.check_address, plan, needs)),
        Check("ports", "does a firewall or another program close ports?", here(network.check_ports, plan, needs)),
        Check("store", "is the store reached, with this token and in time?", here(network.check_store, plan, needs)),
        Check("clock", "can log lines of several nodes be put in order?", here(host.check_clock, needs)),
        Check("shm", "is /dev/shm large enough for NCCL and data loaders?", here(host.check_shm, needs)),
        Check("limits", "do the limits allow the workers' files and threads?", here(host.check_limits, needs)),
    )


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
    argv = python(devices.__name__, str(needs.workers), "1" if needs.wants_gpus else "0")
    probe = Probe(argv, _GPUS_S, environ)
    return lambda: from_json(probe.answer())


def examine(checks: Sequence[Check], limit_s: float = _TORCH_S + _CHECKS_S) -> tuple[Checked, ...]:
    """Run the checks side by side. One that fails or hangs gets a finding that says so."""
    found: dict[str, tuple[Finding, ...]] = {}

    def run(check: Check, finish: Finish) -> None:
        try:
            found[check.name] = finish()
        except ProbeFailed as error:
            found[check.name] = (bad(f"{check.name}: {error}", "something hangs: see to that device or its driver"),)
        except Exception as error:
            # A fault in one check must not hide the others.
            why = f"{check.name}: the check failed ({type(error).__name__}: {error})"
            found[check.name] = (bad(why, "please report this, with the output of elaunch doctor --json"),)

    until_s = time.monotonic() + limit_s
    threads = [threading.Thread(target=run, args=(each, each.begin()), daemon=True) for each in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))
    late = (bad(f"no answer within {limit_s:g} s", "something hangs: see to that device, disk or server"),)
    return tuple(Checked(check, found.get(check.name, late)) for check in checks)


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
    return 1 if worst(each.grade for each in checked) is Grade.BAD else 0


COMMAND = JobCommand(
    "doctor",
    _main,
    [own("json", "", "one JSON object in one line, for machines")],
    usage=["[--json] [options of a job] [script.py args…]"],
    about="""Check this node: can it train? torch and CUDA, GPUs, RDMA, addresses, ports, the job's store, clock,
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


def lines(checked: Sequence[Checked], hostname: str, took_s: float) -> Iterator[str]:
    """A line for each finding; the host's name is first, so that the output of many nodes can be sorted."""
    for each in checked:
        for finding in each.findings:
            advice = f" -> {finding.advice}" if finding.advice else ""
            yield f"{hostname}: {finding.grade.value:4} {each.check.name:7} {finding.found}{advice}"
    counts = Counter(finding.grade for each in checked for finding in each.findings)
    parts = [f"{counts[grade]} {grade.value}" for grade in Grade if counts[grade]]
    conclusion = {
        Grade.OK: "this node can train",
        Grade.WARN: "this node can train; see to what is marked warn",
        Grade.BAD: "this node cannot train as asked",
    }[worst(each.grade for each in checked)]
    yield f"{hostname}: {conclusion} ({', '.join(parts)}; {took_s:.1f} s)"


def as_json(checked: Sequence[Checked], hostname: str, took_s: float) -> Iterator[str]:
    """One object in one line; docs/operations.md has its schema."""
    yield json.dumps(
        {
            "schema": SCHEMA,
            "elaunch": __version__,
            "host": hostname,
            "grade": worst(each.grade for each in checked).value,
            "seconds": round(took_s, 3),
            "checks": [
                {
                    "check": each.check.name,
                    "question": each.check.question,
                    "grade": each.grade.value,
                    "findings": [
                        {"grade": finding.grade.value, "found": finding.found, "advice": finding.advice}
                        for finding in each.findings
                    ],
                }
                for each in checked
            ],
        }
    )
