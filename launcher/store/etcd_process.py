"""A process that runs the job's own etcd and removes all its files at the end: `--store etcd`.

Its arguments are etcd's path, the endpoint, and an empty folder, which is removed at the end. The token is a line on
stdin. The end of stdin ends the process. It prints "ready" when etcd answers.
The certificate that is made from the token is the server's, and etcd accepts no other certificate from a client.
"""

from __future__ import annotations

import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from elaunch.agent.linux import die_with_parent
from elaunch.launcher.options.endpoints import endpoints
from elaunch.rendezvous.secret import Secret

_POLL_S = 0.02
_STOP_S = 3.0
_LAST_WORDS_BYTES = 2048


def main(argv: Sequence[str]) -> int:
    """Run etcd until stdin ends, or etcd ends by itself. Returns the exit code."""
    etcd, place, folder = argv[0], argv[1], Path(argv[2])
    token = sys.stdin.readline().strip()
    if not token:
        # The agent was ended before it could name one.
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    secret = Secret(token)
    # A scheduler signals every process of a job. This process ignores that. etcd cannot be kept from it, and ends.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    try:
        _write(folder / "key.pem", secret.key)
        _write(folder / "cert.pem", secret.certificate)
        process = subprocess.Popen(
            command(etcd, place, folder),
            # The user's ETCD_* variables are for another etcd.
            env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        try:
            return _keep(process, secret, place)
        finally:
            _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(etcd: str, place: str, folder: Path) -> list[str]:
    """etcd's command line: one member, which serves clients at `place`. Its peer port is on loopback only."""
    peer = f"https://127.0.0.1:{_free_port()}"
    flags = {
        "name": "elaunch",
        "data-dir": folder / "data",
        "listen-client-urls": f"https://{place}",
        "advertise-client-urls": f"https://{place}",
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"elaunch={peer}",
        # One member elects itself: the default times only make its start slower.
        "heartbeat-interval": 10,
        "election-timeout": 50,
        "logger": "zap",
        "log-level": "error",
        "enable-grpc-gateway": "true",
    }
    for side in ("", "peer-"):
        flags |= {f"{side}cert-file": folder / "cert.pem", f"{side}key-file": folder / "key.pem"}
        flags |= {f"{side}trusted-ca-file": folder / "cert.pem", f"{side}client-cert-auth": "true"}
    return [etcd, *(f"--{name}={value}" for name, value in flags.items())]


def _keep(process: subprocess.Popen[bytes], secret: Secret, place: str) -> int:
    """Print "ready" when etcd answers, then wait until stdin or etcd ends. If etcd ends, show its last output."""
    assert process.stderr
    log = process.stderr.fileno()
    is_ready, said, sources = False, b"", [0, log]
    while log in sources:
        if not is_ready and _answers(secret, place):
            is_ready = True
            with suppress(BrokenPipeError):
                os.write(1, b"ready\n")
        readable, _, _ = select.select(sources, [], [], None if is_ready else _POLL_S)
        if 0 in readable and not os.read(0, 4096):
            return 0
        if log in readable:
            piece = os.read(log, 65536)
            said = (said + piece)[-_LAST_WORDS_BYTES:]
            if not piece:
                sources.remove(log)
    code = process.wait()
    print(f"elaunch: the job's etcd ended with exit code {code}\n{said.decode(errors='replace')}", file=sys.stderr)
    return 1


def _answers(secret: Secret, place: str) -> bool:
    address = endpoints(place)[0]
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address.host, address.host)
    connection = http.client.HTTPSConnection(host, address.port, context=secret.client_context(), timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    end_s = time.monotonic() + _STOP_S
    while process.poll() is None:
        if time.monotonic() > end_s:
            process.kill()
        time.sleep(_POLL_S)


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
        file.write(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
