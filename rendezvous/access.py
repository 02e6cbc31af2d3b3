"""What a client shows to a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elaunch.rendezvous.endpoint import PREFIX, Endpoint, Login, Tls
from elaunch.rendezvous.store import Denied

if TYPE_CHECKING:
    # Ten milliseconds of import that only TLS is worth.
    import ssl


@dataclass(frozen=True)
class Access:
    """Without `tls` it speaks plainly; a context is one made from the job's token, for elaunch's own served store.

    `login` is a user of etcd, `bearer` what the served store asks for. `plainly` says that http:// was typed, so the
    login may be sent without TLS. `prefix` is what the job's keys begin with; only messages about permissions use it.
    Raises ValueError for a bearer without the context that belongs to it.
    """

    tls: Tls | ssl.SSLContext | None = None
    login: Login | None = None
    bearer: str = field(default="", repr=False)
    plainly: bool = False
    prefix: str = PREFIX

    def __post_init__(self) -> None:
        if self.bearer and (self.tls is None or isinstance(self.tls, Tls)):
            raise ValueError("a bearer goes only to the store whose certificate is made from the same token")

    def check_login(self, endpoint: Endpoint) -> None:
        """Call this before the login is sent. Raises Denied if it would be readable on the way."""
        if self.login and self.tls is None and not self.plainly:
            raise Denied(
                f"the store at {endpoint} is reached without TLS, so the password of etcd's user {self.login.user} is"
                f" not sent; {how_to_send(endpoint)}"
            )


def how_to_send(*endpoints: object) -> str:
    """What to type so that a password is sent to these endpoints."""
    safely, plainly = (",".join(f"{scheme}://{each}" for each in endpoints) for scheme in ("https", "http"))
    return f"type {safely}, or type {plainly} to send it unencrypted"
