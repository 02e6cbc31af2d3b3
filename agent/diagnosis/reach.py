"""Whether a port of another node can be reached: a firewall may close it, and ranks would wait for minutes."""

from __future__ import annotations

import socket

from elaunch.rendezvous.dial import Deadline, dial, is_silence, resolve
from elaunch.rendezvous.endpoint import Endpoint

_TRY_S = 2.0
REFUSED = "refused"


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
