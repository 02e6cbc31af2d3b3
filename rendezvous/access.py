"""What a client shows to a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elaunch.rendezvous.plan import PREFIX, Login, Tls

if TYPE_CHECKING:
    # Ten milliseconds of import that only TLS is worth.
    import ssl


@dataclass(frozen=True)
class Access:
    """Without `tls` it speaks plainly; a context is one made from the job's token, for elaunch's own served store.

    `login` is a user of etcd, `bearer` what the served store asks for. `prefix` is what the keys begin
    with that the user must be allowed to use; only sentences need it.
    """

    tls: Tls | ssl.SSLContext | None = None
    login: Login | None = None
    bearer: str = field(default="", repr=False)
    prefix: str = PREFIX
