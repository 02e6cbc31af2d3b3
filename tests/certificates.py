"""Certificates for tests: an authority, a server's certificate and a client's, as PEM files in a folder."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Certificates:
    """`ca`, `server`, `server_key`, `client`, `client_key`: files.

    The server's certificate is for `hosts`, by name or address, and carries both key usages unless `server_alone`
    (etcd's gateway dials its own server with it); the client's carries the common name `client_name`, or none.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[str] = ("127.0.0.1",), client_name: str = "", *, server_alone: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("elaunch tests")
        ca = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        # keyCertSign and cRLSign: Python requires them, and key identifiers, from 3.13 on.
        signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.ca = self._write("ca", ca.add_extension(signs, critical=True).add_extension(own, critical=False))
        key = ec.generate_private_key(ec.SECP256R1())
        usage = _BOTH[:1] if server_alone else _BOTH
        server = self._builder(_name("server"), key, usage).add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
        )
        self.server, self.server_key = self._write("server", server), self._write_key("server", key)
        key = ec.generate_private_key(ec.SECP256R1())
        client = self._builder(_name(client_name), key, _BOTH)
        self.client, self.client_key = self._write("client", client), self._write_key("client", key)

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, usage: Sequence[x509.ObjectIdentifier] = ()
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False) if usage else builder

    def _write(self, name: str, builder: x509.CertificateBuilder) -> Path:
        path = self._folder / f"{name}.pem"
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> Path:
        path = self._folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return path


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)] if common else [])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
