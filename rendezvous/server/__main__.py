"""The process of the served store. It inherits a bound socket and the job's token, and exits with its parent."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from elaunch.rendezvous.secret import Secret
from elaunch.rendezvous.server.admission import slots
from elaunch.rendezvous.server.server import Server


def main(argv: Sequence[str]) -> int:
    """Serve until stdin ends. `--fd N` names the bound socket; the first line of stdin is the token.

    `--agents N` is the largest number of agents that connect, 0 for `elaunch store`. Prints "ready" when it accepts
    clients.
    """
    # A terminal's Ctrl-C and a scheduler's signals reach all processes of the job, but only the agent must react: it
    # needs its store until it has ended the job.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="elaunch.rendezvous.server")
    parser.add_argument("--fd", type=int, required=True, help="an inherited, bound socket")
    parser.add_argument("--agents", type=int, default=0)
    options = parser.parse_args(argv)
    token = sys.stdin.buffer.readline().decode().removesuffix("\n")
    if not token:
        # The agent exited before it could send one.
        return 0
    # As many open files as the host allows.
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    count = slots(sys.maxsize if files == resource.RLIM_INFINITY else files, options.agents)
    server = Server(socket.socket(fileno=options.fd), Secret(token), count, is_shared=not options.agents)
    server.stop_at_end_of(0)
    with suppress(BrokenPipeError):
        os.write(1, b"ready\n")
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
