"""The head's lines about its store: the store's limits, and the command to type on the other hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import Options, Source, words_of
from elaunch.launcher.options.secret_file import TOKEN_LINE
from elaunch.launcher.options.shell_words import joined, quoted
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import switch
from elaunch.launcher.store.keyring import STORES
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.launcher.store.store_address import MASTER_PORT
from elaunch.rendezvous.addresses import is_meant_locally
from elaunch.rendezvous.endpoint import Endpoint

# Each node has its own value of these.
_OWN = ("node_rank", "local_addr")
# PET_TOKEN_FILE is not written out: ELAUNCH_TOKEN wins over it, but --token-file would win over ELAUNCH_TOKEN.
_OWN_VARIABLES = (*_OWN, "token_file")
# These come first in the line, whatever their source.
_FIRST = ("nnodes", "rdzv_endpoint")

_SWITCHES = {option.name for option in TABLE if option.is_flag}


@dataclass(frozen=True)
class NewToken:
    """The token that a head has made, and how the other nodes get it.

    `kept` is the path of a file in this user's home with the token. It is empty if there is no file, and `trouble` says
    why. The token is shown on a terminal only, because many people may read a log.
    """

    token: str = field(repr=False)
    kept: str
    trouble: str
    is_terminal: bool

    def text_to_type(self, endpoint: Endpoint) -> str:
        """The token if the command for other nodes needs it, else empty. Raises UsageError if nobody could learn it."""
        if self.is_terminal:
            # Only agents on this host can reach a loopback endpoint, and they find the file.
            return "" if self.kept and is_meant_locally(endpoint.host) else self.token
        if not self.kept:
            raise UsageError(
                "nobody could learn the token of the store that this host was to serve: stderr is no terminal, and no"
                f" file can be written in {STORES} ({self.trouble}); give all nodes the same token: {TOKEN_LINE}"
            )
        return ""

    def file_to_type(self, endpoint: Endpoint) -> str:
        """The token's file if the command for other nodes names that, else empty."""
        return "" if self.is_terminal or is_meant_locally(endpoint.host) else self.kept

    def hints(self, endpoint: Endpoint) -> tuple[str, ...]:
        """A line for nodes without the token's file; none if no node needs it."""
        if not (file := self.file_to_type(endpoint)):
            return ()
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        copy = joined(["scp", f"{host}:{file}", "token"])
        return (
            f"the store's token is in {file}, which only you can read: nodes that share this home find it there;"
            f" on another node copy it first ({copy}), and type --token-file token",
        )


def line_for_others(options: Options, plan: RendezvousPlan, token: str, token_file: str = "") -> str:
    """The command line for another host. `token` and `token_file` are empty if the user knows the token already.

    Options from variables are written out, because the other host may not have the variables. Options from a job file
    stay in the file.
    """
    is_static = plan.node_rank is not None
    line: dict[str, str] = {"token_file": token_file} if token_file else {}
    if options.given.get("nnodes") is not Source.COMMAND_LINE:
        line["nnodes"] = nodes(options)
    # A static job's endpoint follows from the master's address, or is the master's address.
    if is_static and (endpoint := options.exported.get("rdzv_endpoint")):
        line["rdzv_endpoint"] = endpoint
    if not is_static and options.given.get("rdzv_endpoint") is not Source.COMMAND_LINE:
        line["rdzv_endpoint"] = str(plan.endpoints[0])
    exported = {name: value for name, value in options.exported.items() if name not in (*_FIRST, *_OWN_VARIABLES)}
    line |= {name: value for name, value in exported.items() if name not in _SWITCHES or switch(value)}
    line |= {name: value for name, value in options.typed.items() if name not in _OWN}
    # Only this host is the head.
    settings = line.pop("rdzv_conf", "").split(",")
    if others := [pair for pair in settings if pair and not pair.strip().startswith("is_host")]:
        line["rdzv_conf"] = ",".join(others)
    line |= {"node_rank": "1"} if is_static else {}
    variables = {"ELAUNCH_TOKEN": token, "ELAUNCH_ENDPOINT": _store_elsewhere(options, plan) if is_static else ""}
    prefix = "".join(f"{name}={quoted(value)} " for name, value in variables.items() if value)
    return f"{prefix}{joined(['elaunch', *words_of(line, options.program)])}"


def _store_elsewhere(options: Options, plan: RendezvousPlan) -> str:
    """The endpoint of a static job's store if only a variable names it; else empty."""
    if "rdzv_endpoint" in options.given:
        return ""
    beside_master = Endpoint(plan.master_addr or "", ((options.master_port or (0, 0))[0] or MASTER_PORT) + 1)
    return "" if plan.endpoints[0] == beside_master else str(plan.endpoints[0])


def nodes(options: Options) -> str:
    """The value of --nnodes, as `N` or `MIN:MAX`."""
    return ":".join(str(number) for number in dict.fromkeys(options.nnodes))


def about(plan: RendezvousPlan) -> str:
    """The line about the limits of a store that the head serves itself."""
    kind = "an etcd of its own" if plan.serving is Serving.ETCD else "its memory"
    return (
        f"this host serves the job's store at {plan.endpoints[0]} from {kind}: store and job end with this host's"
        " elaunch; a job that must outlive any host needs --rdzv-endpoint of an etcd cluster"
    )


def invitation(options: Options, plan: RendezvousPlan, new_token: NewToken) -> tuple[str, ...]:
    """The lines that a head prints. A token that the user gave is not shown. Raises UsageError."""
    endpoint = plan.endpoints[0]
    many = options.nnodes[1] > 2
    others = "each other node" if many else "the other node"
    same = " with the same token" if plan.token else ""
    ranks = ", with --node-rank 2 and so on after the first of them" if plan.node_rank is not None and many else ""
    token = "" if plan.token else new_token.text_to_type(endpoint)
    token_file = "" if plan.token else new_token.file_to_type(endpoint)
    line = line_for_others(options, plan, token, token_file)
    return (
        about(plan),
        f"on {others} type{same}{ranks}: {line}",
        *(() if plan.token else new_token.hints(endpoint)),
    )
