"""How one process of a user reaches the store of that user's job, as JSON: the plan that the job's agent has.

An agent gives it to its own user's processes alone (docs/security.md): it holds the token or the password.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from elaunch.launcher.store.rendezvous_plan import RendezvousPlan
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.endpoint import Tls


def way_of(plan: RendezvousPlan) -> str:
    """The plan as JSON. Another process has another working directory, so files get their whole paths."""
    tls = plan.tls
    whole = Tls(_whole(tls.ca), _whole(tls.certificate), _whole(tls.key)) if tls else None
    return encode(replace(plan, tls=whole))


def plan_by(way: str) -> RendezvousPlan:
    """The plan in the JSON. Raises ValueError."""
    return decode(RendezvousPlan, way)


def _whole(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path else path
