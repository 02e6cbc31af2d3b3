"""What a head says about its store: what it does not give, and the line to type on the other hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from elaunch.launcher.errors import UsageError
from elaunch.launcher.network.reach import is_meant_locally
from elaunch.launcher.options.argv import normalise
from elaunch.launcher.options.options import Options, Source
from elaunch.launcher.options.secret_file import TOKEN_LINE
from elaunch.launcher.options.shell_words import joined, quoted
from elaunch.launcher.options.table import TABLE, OptionSpec
from elaunch.launcher.options.values import switch
from elaunch.launcher.store.keyring import STORES
from elaunch.launcher.store.plan import MASTER_PORT
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.rendezvous.endpoint import Endpoint

# Each node has its own.
_OWN = ("node-rank", "local-addr")
# Of a variable: who set ELAUNCH_TOKEN too has that as the job's secret, and on the command line the file would win.
_OWN_VARIABLES = (*_OWN, "token-file")
# They are written first, wherever they came from.
_FIRST = ("nnodes", "rdzv-endpoint")

_SPECS = {spec.dest: spec for spec in TABLE}


@dataclass(frozen=True)
class Telling:
    """How the token that a head has made gets to the other nodes.

    `kept` is the file in this user's home with the token. It is empty if there is none, and `trouble` says why. Many
    people read a log, so the token itself is shown on a terminal only.
    """

    token: str = field(repr=False)
    kept: str
    trouble: str
    is_terminal: bool

    def shown(self, endpoint: Endpoint) -> str:
        """The token if the line to type needs it, else empty. Raises UsageError if nobody could learn the token."""
        if self.is_terminal:
            # Only agents on this host reach that endpoint, and they find the file.
            return "" if self.kept and is_meant_locally(endpoint.host) else self.token
        if not self.kept:
            raise UsageError(
                "nobody could learn the token of the store that this host was to serve: stderr is no terminal, and no"
                f" file can be kept in {STORES} ({self.trouble}); give all nodes the same token: {TOKEN_LINE}"
            )
        return ""

    def way(self, endpoint: Endpoint) -> tuple[str, ...]:
        """A further line, for nodes on which the line to type may not be enough."""
        if self.is_terminal or is_meant_locally(endpoint.host):
            return ()
        return (
            f"its token is in {self.kept}, which only you can read: nodes that share this home find it there; for"
            " other nodes copy the file, and add --token-file FILE to the line",
        )


def line_for_others(options: Options, plan: RendezvousPlan, token: str) -> str:
    """The command line for another host; `token` is empty where a person knows it already.

    What came from variables is written out: the other host need not have them. What came from a job file is in that.
    """
    words = normalise(options.typed)
    is_static = plan.node_rank is not None
    line: list[str] = []
    if options.given.get("nnodes") is not Source.COMMAND_LINE:
        line += ["--nnodes", nodes(options)]
    # A static job's endpoint follows from its master's address, or is that.
    if is_static and (endpoint := options.exported.get("rdzv_endpoint")):
        line += ["--rdzv-endpoint", endpoint]
    if not is_static and options.given.get("rdzv_endpoint") is not Source.COMMAND_LINE:
        line += ["--rdzv-endpoint", str(plan.endpoints[0])]
    for dest, value in options.exported.items():
        spec = _SPECS[dest]
        if spec.name not in (*_FIRST, *_OWN_VARIABLES) and not (spec.is_switch and not switch(value)):
            line += _words(spec, value)
    for spec, value in words.options:
        if spec.name not in _OWN:
            line += _words(spec, value)
    if is_static:
        line += ["--node-rank", "1"]
    # A program that begins with a dash is one only after two.
    line += ["--"] if words.program and words.program[0].startswith("-") and words.program[0] != "-" else []
    variables = {"ELAUNCH_TOKEN": token, "ELAUNCH_ENDPOINT": _store_elsewhere(options, plan) if is_static else ""}
    prefix = "".join(f"{name}={quoted(value)} " for name, value in variables.items() if value)
    return f"{prefix}{joined(['elaunch', *line, *words.program])}"


def _words(spec: OptionSpec, value: str) -> list[str]:
    """One option as it is typed on another host: that one is no head."""
    if spec.is_switch:
        return [f"--{spec.name}"]
    if spec.name == "rdzv-conf":
        value = ",".join(pair for pair in value.split(",") if not pair.strip().startswith("is_host"))
        if not value:
            return []
    return [f"--{spec.name}={value}"] if value.startswith("-") else [f"--{spec.name}", value]


def _store_elsewhere(options: Options, plan: RendezvousPlan) -> str:
    """The store of a static job where a variable alone names it, not its master's address or an option."""
    if "rdzv_endpoint" in options.given:
        return ""
    beside_master = Endpoint(plan.master_addr or "", (options.master_port or MASTER_PORT) + 1)
    return "" if plan.endpoints[0] == beside_master else str(plan.endpoints[0])


def nodes(options: Options) -> str:
    """--nnodes as it is typed."""
    return ":".join(str(number) for number in dict.fromkeys(options.nnodes))


def about(plan: RendezvousPlan) -> str:
    """The line that says what a store of the head's own does not give."""
    kind = "an etcd of its own" if plan.serving is Serving.ETCD else "its memory"
    return (
        f"this host serves the job's store at {plan.endpoints[0]} from {kind}: it ends with this host's elaunch, and so"
        " does the job; one that must outlive any host needs --rdzv-endpoint of an etcd cluster"
    )


def invitation(options: Options, plan: RendezvousPlan, telling: Telling) -> tuple[str, ...]:
    """The lines that a head prints. A token that was given is not shown. Raises UsageError."""
    endpoint = plan.endpoints[0]
    many = options.nnodes[1] > 2
    others = "each other node" if many else "the other node"
    same = " with the same token" if plan.token else ""
    ranks = ", with --node-rank 2 and so on after the first of them" if plan.node_rank is not None and many else ""
    line = line_for_others(options, plan, "" if plan.token else telling.shown(endpoint))
    return (
        about(plan),
        f"on {others} type{same}{ranks}: {line}",
        *(() if plan.token else telling.way(endpoint)),
    )
