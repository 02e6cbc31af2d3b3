"""Detects which store listens at an endpoint: an etcd of the site, or the job's own served store."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Protocol, TypeVar

from elaunch.rendezvous.endpoint import Access, Endpoint
from elaunch.rendezvous.etcd.http_client import certificate_at, unverified_context
from elaunch.rendezvous.etcd.store import EtcdStore
from elaunch.rendezvous.etcd.transport import EtcdError, GatewayOff
from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.store import Denied, StoreError, Unavailable

Result = TypeVar("Result")


class TokenLookup(Protocol):
    """This user's tokens of the stores that elaunch serves now."""

    def token_for(self, certificate: bytes) -> str:
        """The token from which a certificate (DER) was made, or empty."""

    def path_of(self, endpoint: Endpoint) -> str:
        """The file that records a store with a token at `endpoint`, or empty."""


class FoundStore(EtcdStore):
    """The store at `endpoint`: the job's own over TLS with its token, or else an etcd without TLS.

    The first `check` that reaches the store finds out which one it is. `token` is empty if none was given; `keyring`
    may have one then. `expects_ours`: the user has not named an etcd, so a server that does not know the given token is
    refused. `log` gets a line that names an etcd without TLS which the user may not expect.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: str,
        plainly: Access,
        deadline_s: float,
        *,
        expects_ours: bool = False,
        keyring: TokenLookup | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__([endpoint], plainly, deadline_s)
        self._endpoint = endpoint
        self._secret = Secret(token) if token else None
        self._connect_s = deadline_s
        self._expects_ours = expects_ours
        self._keyring = keyring
        self._log = log
        self._is_found = False
        # A line about an etcd without TLS, until it is logged.
        self._warning = ""

    def check(self) -> str:
        if not self._is_found:
            if secret := self._secret_of_server():
                self.use(Access(tls=secret.client_context(), bearer=secret.bearer))
            else:
                self._check_in_the_clear()
            self._is_found = True
        version = super().check()
        if self._warning:
            # Only now: before, what listens there might not be a store.
            self._log(self._warning)
            self._warning = ""
        return version

    def _secret_of_server(self) -> Secret | None:
        """The secret that the server there has proven to have; None for a server without TLS."""
        secret = self._secret
        certificate = _certificate_at(self._endpoint, secret, self._connect_s)
        if certificate is not None and secret is None:
            if not (token := self._keyring.token_for(certificate) if self._keyring else ""):
                raise Denied(
                    f"the store at {self._endpoint} is a job's own and requires its token; type the line that elaunch"
                    " printed there (ELAUNCH_TOKEN=… elaunch …), or add --token-file with a copy of the file that it"
                    " named; for an etcd that speaks TLS, type --rdzv-endpoint https://…"
                )
            secret = Secret(token)
            certificate = _certificate_at(self._endpoint, secret, self._connect_s)
        return secret if certificate is not None else None

    def _check_in_the_clear(self) -> None:
        """Raises Denied if the server without TLS is not to be used: a store with a token is expected there."""
        if self._secret and self._expects_ours:
            try:
                self._transport.version(self._endpoint, "", self._connect_s)
            except GatewayOff:
                pass
            except (EtcdError, StoreError) as error:
                # A response other than a denial may come from a proxy in front of an etcd.
                if isinstance(error, Denied):
                    raise
            raise Denied(
                f"what listens at {self._endpoint} does not know the job's token: it is an etcd, or poses as the job's"
                f" store; if you mean this etcd, type --rdzv-endpoint http://{self._endpoint}"
            )
        if path := self._keyring.path_of(self._endpoint) if self._keyring else "":
            raise Denied(
                f"{path} shows that your elaunch serves a store with a token at {self._endpoint}, but what answers"
                " there does not speak TLS: somebody may intercept the connection; if an etcd is there now, type"
                f" http://{self._endpoint}"
            )
        self._access.check_login(self._endpoint)
        if self._secret or self._expects_ours:
            self._warning = (
                f"the store at {self._endpoint} is an etcd without TLS: anybody who can reach it can read and"
                f" change the job{', in spite of the token' if self._secret else ''}; if you mean this etcd, type"
                f" --rdzv-endpoint http://{self._endpoint}"
            )

    def _with_token(self, endpoint: Endpoint, call: Callable[[str], Result]) -> Result:
        # Nothing is sent in the clear to a store that may be the job's own.
        if not self._is_found:
            raise Unavailable(f"the store at {endpoint} has not been reached yet")
        return super()._with_token(endpoint, call)


def _certificate_at(endpoint: Endpoint, secret: Secret | None, deadline_s: float) -> bytes | None:
    """The certificate (DER) of the server there; None for a server without TLS.

    With `secret`, the server has proven that it has the same token. An etcd with its own certificates never gets here,
    since its endpoint is typed with https://. Raises Unavailable if nothing listens, Denied if the token is wrong.
    """
    try:
        return certificate_at(endpoint, secret.client_context() if secret else unverified_context(), deadline_s)
    except ssl.SSLCertVerificationError:
        raise Denied(
            f"the token here is not that of the store at {endpoint}; give all nodes the same ELAUNCH_TOKEN, or type the"
            " line that elaunch printed there"
        ) from None
    except OSError as error:
        raise Unavailable(f"{endpoint}: {error.strerror or error}") from error
