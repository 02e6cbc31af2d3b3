"""Whether a port of another node can be reached: a firewall may close it, and ranks would wait for minutes."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from elaunch.rendezvous.dial import Deadline, dial, is_silence, resolve
from elaunch.rendezvous.endpoint import Endpoint

_TRY_S = 2.0
REFUSED = "refused"
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def why_not(master: Endpoint) -> str:
    """Why no connection to that port is possible now; empty if one is, or if nothing is known. Waits for 2 s."""
    try:
        dial(resolve(master.host, master.port, _TRY_S), Deadline(_TRY_S).left).close()
    except socket.gaierror:
        return ""
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return "no answer"
    except OSError as error:
        # Not this agent's own trouble, as too many open files: the worker may have none.
        return (error.strerror or str(error)).lower() if is_silence(error) else ""
    return ""


def kernels_ports() -> tuple[int, int]:
    """The first and the last of the ports that the kernel gives to gloo and NCCL."""
    with suppress(OSError, ValueError):
        first, last = map(int, _PORTS.read_text().split())
        return first, last
    return 32768, 60999


def unreachable_text(master: Endpoint, why: str) -> str:
    """The sentence, with the ports that must be open."""
    first, last = kernels_ports()
    return (
        f"this node cannot connect to {master} ({why}), MASTER_PORT on the node of rank 0: a firewall? Ports to open"
        f" between all nodes: MASTER_PORT (--master-port FIRST:LAST limits it), and {first}-{last}, from which the"
        " kernel gives gloo and NCCL theirs; `elaunch doctor` with the options of this job tries them"
    )
