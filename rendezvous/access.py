"""What a client shows to a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elaunch.rendezvous.plan import PREFIX, Endpoint, Login, Tls
from elaunch.rendezvous.store import Denied

if TYPE_CHECKING:
    # Ten milliseconds of import that only TLS is worth.
    import ssl


@dataclass(frozen=True)
class Access:
    """Without `tls` it speaks plainly; a context is one made from the job's token, for elaunch's own served store.

    `login` is a user of etcd, `bearer` what the served store asks for. `plainly` says that http:// was typed: then the
    login may be sent without TLS. `prefix` is what the keys begin with that the user must be allowed to use; only
    sentences need it. Raises ValueError for a bearer without the context that goes with it.
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
        """To be asked before the login is sent. Raises Denied where anybody who listens in would read it."""
        if self.login and self.tls is None and not self.plainly:
            raise Denied(
                f"the store at {endpoint} is reached without TLS, so the password of etcd's user {self.login.user} is"
                f" not sent; {how_to_send(endpoint)}"
            )


def how_to_send(*endpoints: object) -> str:
    """What to type for endpoints that a password is to go to."""
    safely, plainly = (",".join(f"{scheme}://{each}" for each in endpoints) for scheme in ("https", "http"))
    return f"type {safely}, or, to send it unencrypted all the same, {plainly}"
