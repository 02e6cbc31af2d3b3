"""The signals that `--signals-to-handle` may name."""

from __future__ import annotations

import signal

from elaunch.launcher.errors import nearest
from elaunch.launcher.options import values

_NOBODYS = ("SIGKILL", "SIGSTOP")
_USUAL = "the usual ones are SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2"


def signal_names(raw: values.Raw) -> tuple[str, ...]:
    """Converts a comma list of signal names. Raises ValueError as the functions of `values` do."""
    names = values.names(raw)
    # `__members__` also has the second names of signals, for example SIGCLD.
    known = [name for name in signal.Signals.__members__ if name not in _NOBODYS]
    for name in names:
        if name in known:
            continue
        if name in _NOBODYS:
            raise ValueError(f"names {name}, which no process can handle; leave it out")
        near = nearest(name.upper().removeprefix("SIG"), (each.removeprefix("SIG") for each in known))
        hint = f"did you mean SIG{near}? " if near else ""
        raise ValueError(f"names {name}, and there is no such signal; {hint}{_USUAL}")
    return names


def signal_number(name: str) -> int:
    return int(signal.Signals[name])
