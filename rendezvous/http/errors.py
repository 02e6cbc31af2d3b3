"""Errors of a connection as sentences for the user."""

from __future__ import annotations

import errno
import os
import socket
import ssl

from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.http.dial import NoAnswer, is_silence
from elaunch.rendezvous.http.response import Garbled, NotHttp
from elaunch.rendezvous.shortage import shortage
from elaunch.rendezvous.store import Denied, OwnLimit, StoreError, TimedOut, Unavailable

# OpenSSL's names of the alerts by which a server rejects the client's certificate.
_CLIENT_ALERTS = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")


def connection_error(error: OSError | Garbled, endpoint: Endpoint, waited: str, hint: str) -> StoreError:
    """The store's error for `error`, as a sentence.

    `waited` is the deadline that passed ("0.5 s"; "" is without one). `hint` tells the user what to check if the server
    is not trusted.
    """
    match error:
        case NotHttp():
            if error.start.startswith(b"\x15\x03"):
                return Denied(f"{endpoint} speaks TLS; use https://{endpoint}")
            return Denied(f"{endpoint} {error}; is that the store's client port?")
        case Garbled():
            return Unavailable(f"{endpoint} {error}")
        case ssl.SSLError():
            return _tls(error, endpoint, hint)
        case socket.gaierror():
            return Unavailable(f"the name {endpoint.host} cannot be resolved: {error.strerror}")
        case NoAnswer():
            return _silent(TimedOut(f"no answer from {endpoint} within {waited}"))
        case TimeoutError():
            if not waited or error.errno:
                return _silent(Unavailable(f"{endpoint} is gone: its host does not acknowledge what was sent"))
            return TimedOut(f"no answer from {endpoint} within {waited}")
        case ConnectionRefusedError():
            return Unavailable(f"{endpoint} refuses connections: nobody listens there")
        case ConnectionError():
            return Unavailable(f"{endpoint} ended the connection")
        case _ if is_silence(error):
            return _silent(Unavailable(f"{endpoint} cannot be reached: {error.strerror or error}"))
        case _ if why := shortage(error):
            running = f", or prlimit --pid {os.getpid()} --nofile=4096" if error.errno == errno.EMFILE else ""
            return OwnLimit(why + running)
        case _:
            ports = " (are all local ports in use? ss -s; sysctl net.ipv4.ip_local_port_range)"
            hint = ports if error.errno == errno.EADDRNOTAVAIL else ""
            return OwnLimit(f"this host opens no connection to {endpoint}: {error.strerror or error}{hint}")


def _silent(error: Unavailable) -> Unavailable:
    error.is_silent = True
    return error


def _tls(error: ssl.SSLError, endpoint: Endpoint, hint: str) -> StoreError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Denied(f"{endpoint}: its certificate is not trusted: {error.verify_message}; {hint}")
    reason = error.reason or ""
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason or "RECORD_LAYER_FAILURE" in reason:
        return Denied(f"{endpoint} does not speak TLS; use http://{endpoint}")
    if any(alert in reason for alert in _CLIENT_ALERTS):
        return Denied(f"{endpoint} asks for a client certificate that it trusts ({reason.lower().replace('_', ' ')})")
    if "EOF" in reason or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Unavailable(f"{endpoint} ended the connection")
    return Unavailable(f"{endpoint}: TLS failed: {reason or error}")
