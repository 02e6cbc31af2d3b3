"""`elaunch doctor`: can this node train, with the options of a job?"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

import click

from elaunch.launcher.agent_config import count_workers, master_ports
from elaunch.launcher.cluster.cluster import Cluster, line
from elaunch.launcher.cluster.fill_in import concerning, settle
from elaunch.launcher.cluster.head_address import cluster_of
from elaunch.launcher.doctor import show
from elaunch.launcher.doctor.checks import Checked, checks_for, examine
from elaunch.launcher.doctor.facts import Needs
from elaunch.launcher.doctor.findings import Grade, worst
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.command_line import own
from elaunch.launcher.options.options import JobCommand, Options, options_of
from elaunch.launcher.options.secret_file import read_secret
from elaunch.launcher.preflight import check_folder, check_log_dir, check_program
from elaunch.launcher.resources import as_started, detect
from elaunch.launcher.store.plan import plan
from elaunch.launcher.store.rendezvous_plan import Planned
from elaunch.rendezvous.job_spec import ProgramKind
from elaunch.rendezvous.texts import node_host

# Stands for the program, if none is typed: options are complete without one here.
_NO_PROGRAM = "doctor"


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
    trouble = "" if options.target == _NO_PROGRAM else program_trouble(options, environ)
    scheduler = line(cluster) if cluster else ""
    checked = examine(checks_for(needs, planned.plan, environ, scheduler, trouble), needs)
    _print(checked, time.monotonic() - start_s, is_json=ctx.params["json"])
    return 1 if worst(each.grade for each in checked) is Grade.BAD else 0


COMMAND = JobCommand(
    "doctor",
    _main,
    [own("json", "", "one JSON object in one line, for machines")],
    usage=["[--json] [options of a job] [script.py args…]"],
    about="""Look at this node: can it train? GPUs, driver, NCCL, torch, addresses, ports, the job's store, clock,
/dev/shm, disks, limits, memory, cgroup, py-spy. Every line that is not ok says what to do.

With the options of a job (--nnodes, --rdzv-endpoint, --token-file, --log-dir, --nproc-per-node, …)
it looks at what that job needs; nothing is started, and nothing is written to the store.""",
    ending="""On all nodes of a Slurm job: srun --ntasks-per-node=1 elaunch doctor
Exit codes: 0 nothing is bad, 1 something is bad, 2 the command line is wrong.""",
)


def needed(options: Options, environ: Mapping[str, str], cluster: Cluster | None) -> tuple[Needs, Planned]:
    """What a job with these options needs of this node, and the plan of its rendezvous. Raises UsageError."""
    if cluster:
        cluster = concerning(options, cluster, environ)
        options = settle(options, cluster)
    planned = plan(options, environ, read_secret, cluster)
    host = detect(environ)
    wants_gpus = options.nproc_per_node == "gpu"
    workers = 1
    with suppress(UsageError):
        workers, _ = count_workers(options.nproc_per_node, host, cluster)
    return (
        Needs(
            workers=workers,
            nodes_max=1 if planned.plan.is_alone else options.nnodes[1],
            ports=master_ports(options, planned),
            log_dir=None if options.log_dir is None else str(options.log_dir),
            interpreter=environ.get("PYTHON_EXEC") or host.python,
            uses_python=options.kind is not ProgramKind.COMMAND,
            wants_gpus=wants_gpus,
        ),
        planned,
    )


def program_trouble(options: Options, environ: Mapping[str, str]) -> str:
    """Why a job with these options would not start; empty if it would."""
    try:
        check_program(options, environ)
        check_log_dir(options)
    except UsageError as error:
        return str(error)
    return ""


def _print(checked: tuple[Checked, ...], took_s: float, *, is_json: bool) -> None:
    host = node_host(socket.gethostname())
    if is_json:
        print(show.as_json(checked, host, took_s))
        return
    if os.isatty(1):
        try:
            show.print_table(checked, host, took_s)
            return
        except ImportError:
            print("elaunch: rich is not installed, so there is no table", file=sys.stderr)
    print("\n".join(show.lines(checked, host, took_s)))
