"""Authentication and encryption between a client and the served store, both derived from the job's token.

Both sides derive one Ed25519 key from the token, and from that key the same self-signed certificate. The server
presents the certificate, and the client trusts no other. The client then sends a second value derived from the token.
So every holder of the token is trusted completely, and could also impersonate the server.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import ssl
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TOKEN_CHARACTERS_MIN = 16
# Any client that can connect sees the certificate, and can brute-force the token offline. With scrypt (RFC 7914) each
# guess costs 60 ms and 32 MB. A token that elaunch generates is strong enough without that.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**15, 8, 1
_SALT = b"elaunch: the store's certificate and bearer, 1"
# Constants, so that both sides make the same certificate. Its validity must not depend on any clock.
_SERIAL = 1
_NOT_BEFORE = datetime.datetime(1970, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)


def new_token() -> str:
    """A random token of 128 bits: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def fingerprint(certificate: bytes) -> str:
    """A short name for a certificate (DER): 32 hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()[:32]


class Secret:
    """Everything that is derived from a token. Raises ValueError, with a sentence, for a token that cannot be used."""

    def __init__(self, token: str) -> None:
        # A person types it on the other hosts, and it is one line on the stdin of the store's process.
        if not token.isprintable():
            raise ValueError(
                "the job's token has characters that cannot be typed; take the output of: openssl rand -hex 16"
            )
        if len(token) < TOKEN_CHARACTERS_MIN:
            raise ValueError(
                f"the job's token has {len(token)} characters, and it takes at least {TOKEN_CHARACTERS_MIN} to keep"
                f" others out; let elaunch make one, or take the output of: openssl rand -hex 16"
            )
        self._token = token

    @cached_property
    def bearer(self) -> str:
        """The value that a client sends as `Authorization: Bearer …`, only inside TLS."""
        return self._derive(b"bearer").hex()

    @cached_property
    def certificate(self) -> str:
        """The server's certificate, in PEM. Each side makes it from the token."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import NameOID

        # No extensions: two versions of the package might write them differently.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elaunch store")])
        builder = x509.CertificateBuilder(name, name, self._key.public_key(), _SERIAL, _NOT_BEFORE, _NOT_AFTER)
        return builder.sign(self._key, None).public_bytes(Encoding.PEM).decode()

    @property
    def der(self) -> bytes:
        """The certificate in DER."""
        return ssl.PEM_cert_to_DER_cert(self.certificate)

    @cached_property
    def key(self) -> str:
        """The certificate's private key, in PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

    def server_context(self) -> ssl.SSLContext:
        """The server's TLS context."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # No client resumes sessions: they keep their connections.
        context.num_tickets = 0
        # ssl reads keys from files only. This file is in memory and disappears with its descriptor.
        fd = os.memfd_create("elaunch-store-key", os.MFD_CLOEXEC)
        try:
            os.write(fd, f"{self.key}{self.certificate}".encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def client_context(self) -> ssl.SSLContext:
        """The client's TLS context. It accepts only a server with the same token, whatever its host name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        return context

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._derive(b"key"))

    def _derive(self, label: bytes) -> bytes:
        return hmac.digest(_seed(self._token), label, "sha256")


@lru_cache(maxsize=4)
def _seed(token: str) -> bytes:
    memory = 256 * _SCRYPT_N * _SCRYPT_R
    return hashlib.scrypt(token.encode(), salt=_SALT, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P, maxmem=memory, dklen=32)
