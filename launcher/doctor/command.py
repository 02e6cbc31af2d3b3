"""`elaunch doctor`: can this node train, with the options of a job? Also its checks of address, ports and store."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from statistics import median
from typing import TypeAlias

import click

from elaunch import __version__
from elaunch.agent.diagnosis.investigate import REFUSED, connect_error, ephemeral_ports
from elaunch.agent.linux import in_threads
from elaunch.launcher.agent_config import count_workers, master_ports
from elaunch.launcher.doctor import host
from elaunch.launcher.doctor.host import Finding, Grade, Needs, bad, ok, warn, worst
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import (
    NoAddress,
    Owner,
    addresses,
    can_be_bound,
    detect,
    environ_at_start,
    gloo_interface,
    interface_of,
    own_address,
    owner_of,
)
from elaunch.launcher.inspect.text import duration
from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.options import JobCommand, Options, options_of
from elaunch.launcher.preflight import check_folder, read_secret
from elaunch.launcher.schedulers.defaults import cluster_of, facts_of_job, settle
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.store.connect import store_of
from elaunch.launcher.store.locate import Planned, RendezvousPlan, plan
from elaunch.launcher.store.serve import decide_head, listen
from elaunch.rendezvous.endpoint import Endpoint, is_address
from elaunch.rendezvous.format import node_host
from elaunch.rendezvous.store import Denied, StoreError
from elaunch.rendezvous.types import ProgramKind

SCHEMA = 1
# A placeholder if no program is given: here options are complete without one.
_NO_PROGRAM = "doctor"
# Each check has its own deadlines: the import of torch the longest, then the store's 20 requests.
_LIMIT_S = host.TORCH_S + 30.0
_RESOLVE_S = 2.0
_SLOW_RESOLVER_S = 1.0
# An agent sends 1.6 requests a second, each with a deadline of 0.5 s.
_REQUESTS, _SLOW_STORE_S, _TOO_SLOW_STORE_S = 20, 0.1, 0.5
# A prefix that no job uses.
_NOTHING = "/elaunch-nothing/"

Check: TypeAlias = Callable[[], Iterable[Finding]]
# Each check with its findings, of which there is at least one.
Checked: TypeAlias = Mapping[str, tuple[Finding, ...]]


def checks_for(needs: Needs, plan: RendezvousPlan, environ: Mapping[str, str]) -> dict[str, Check]:
    """All checks for a job, in the order in which they are shown."""
    return {
        "torch": partial(host.check_torch, environ, needs),
        "gpus": partial(host.check_gpus, environ, needs),
        "address": partial(check_address, plan, needs),
        "ports": partial(check_ports, plan, needs),
        "store": partial(check_store, plan),
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
    resources = detect(environ, options.nproc_per_node)
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


def check_address(plan: RendezvousPlan, needs: Needs) -> Iterator[Finding]:
    """How the other nodes reach this one, and which interface gloo must be given."""
    start_s = time.monotonic()
    try:
        address = plan.own_addr or ("127.0.0.1" if plan.is_alone else own_address(plan.endpoints, _RESOLVE_S))
        number = address if is_address(address) else addresses(address, _RESOLVE_S)[0]
    except (NoAddress, UsageError) as error:
        yield bad(str(error), "correct --rdzv-endpoint, the name or the route, or give --local-addr")
        return
    if not can_be_bound(number):
        yield bad(f"this node cannot listen on {address}", "give one of its own: --local-addr")
    elif needs.nodes_max == 1:
        yield ok(f"one node: the workers meet at {address}")
    else:
        gloo = gloo_interface(number)
        text = f"the other nodes reach this one at {address} ({interface_of(number) or 'no interface has it'})"
        if (took_s := time.monotonic() - start_s) > _SLOW_RESOLVER_S:
            yield warn(f"{text}; the resolver took {duration(took_s)}", "check the first server in /etc/resolv.conf")
        else:
            yield ok(f"{text}; GLOO_SOCKET_IFNAME={gloo[0]} is set for the workers: {gloo[1]}" if gloo else text)


def check_ports(plan: RendezvousPlan, needs: Needs) -> Iterator[Finding]:
    """Whether a firewall blocks ports of the endpoint's host: MASTER_PORT, and ephemeral ones, as gloo and NCCL get."""
    head = plan.endpoints[0].host if plan.endpoints and plan.serves else ""
    is_other = False
    with suppress(NoAddress):
        is_other = bool(head) and owner_of(head, _RESOLVE_S) is Owner.OTHER_HOST
    if not is_other:
        yield ok("no other node's ports are tried from here")
        return
    low, high = ephemeral_ports()
    tried = tuple(dict.fromkeys([*needs.ports[:1], *needs.ports[-1:], *random.sample(range(low, high), 2)]))
    # A refused connection has passed the firewall.
    silent = {port: why for port in tried if (why := connect_error(Endpoint(head, port))) not in ("", REFUSED)}
    if silent:
        yield warn(
            f"{head} does not answer on ports {', '.join(map(str, silent))} ({next(iter(silent.values()))})",
            "if it is a node of the job, its firewall must let all nodes through to MASTER_PORT (--master-port"
            f" FIRST:LAST limits it), and to {low}-{high}, from which the kernel gives gloo and NCCL theirs",
        )
    else:
        yield ok(f"{head} answers on ports {', '.join(map(str, tried))}, as MASTER_PORT, gloo and NCCL need it")


def check_store(plan: RendezvousPlan) -> Iterator[Finding]:
    """Whether the job's store is reachable, accepts this node, and responds in time."""
    if plan.is_alone:
        yield ok("one node needs no store")
        return
    where = ",".join(str(endpoint) for endpoint in plan.endpoints)
    try:
        with closing(store_of(plan, lambda _: None)) as store:
            version = store.check() or "unknown: permission denied"
            latencies_s = []
            for _ in range(_REQUESTS):
                start_s = time.monotonic()
                store.read(_NOTHING)
                latencies_s.append(time.monotonic() - start_s)
        yield judge_latencies(f"{where} answers (version {version})", latencies_s)
    except (Denied, UsageError) as error:
        yield bad(str(error), "a job with these options is refused, and ends with exit code 2")
    except StoreError as error:
        yield _unreached(plan, where, str(error))


def judge_latencies(text: str, times_s: Sequence[float]) -> Finding:
    """The finding about the latencies of a store's responses."""
    middle_s = median(times_s)
    text = f"{text}: median {duration(middle_s)} of {len(times_s)} requests, the longest {duration(max(times_s))}"
    if middle_s > _TOO_SLOW_STORE_S:
        return bad(text, "a request has 0.5 s; use a nearer store, or --rdzv-conf lease_ttl=10")
    if middle_s > _SLOW_STORE_S:
        return warn(text, "use a nearer or less busy store; etcd needs a local SSD")
    return ok(text)


def _unreached(plan: RendezvousPlan, where: str, why: str) -> Finding:
    """Why no store was reached; if this node would serve it, whether it can listen."""
    if not plan.serves:
        return bad(f"{where} cannot be reached: {why}", "start etcd; check the firewall, the route, --rdzv-endpoint")
    if not decide_head(plan, lambda _: None):
        way_out = "this is fine if the head has not started yet; else check the firewall, the route, --rdzv-endpoint"
        return warn(f"no store answers at {where} yet: {why}", way_out)
    try:
        if listener := listen(plan.endpoints[0]):
            listener.close()
            return ok(f"nothing listens at {where} yet; this node would serve the job's store there")
        trouble = "another program listens there, which is not a store"
    except (UsageError, SiteError) as error:
        trouble = str(error)
    return bad(f"this node cannot serve the store at {where}: {trouble}", "choose another port")
