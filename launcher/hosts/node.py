"""One host's side of `elaunch --hosts`: started by ssh, it checks this host, starts the agent, and passes signals on.

The launcher writes JSON lines to stdin: the job, then the node's place in it, then signals, and 0 as a heartbeat. So
neither the job's secret nor its environment is in an argument or a shell's environment, and nothing needs quoting. The
end of stdin, or no heartbeat, means that the launcher, ssh or the network has gone: the agent gets SIGTERM. The reply
is a line on stdout that begins with a mark, since a login shell may print something first. All output after it is the
agent's.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path and not getattr(sys.flags, "safe_path", False):
    # Python put the current folder first; a json.py of the user's there must not be imported.
    del sys.path[0]

import json
import os
import select
import signal
import subprocess
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from elaunch import __version__
from elaunch.agent.linux import die_with_parent
from elaunch.launcher.errors import UsageError
from elaunch.launcher.host import interpreter_options
from elaunch.launcher.options.options import parse
from elaunch.launcher.preflight import check_options


def main() -> int:
    """The exit code is the agent's; if a signal has killed the agent, that of ssh for a lost connection."""
    # "client's address, its port, server's address, its port"
    ends = dict(zip(("client", "client_port", "server"), os.environ.get("SSH_CONNECTION", "").split(), strict=False))
    if (job := _read()) is None:
        return 0
    refusal = _refusal(job)
    # The line before may lack its end.
    print(f"\n{sys.argv[1]} {json.dumps({'refusal': refusal, **ends})}", flush=True)
    if refusal or (start := _read()) is None:
        return 0
    os.environ.update(start["environ"])
    # Else Ctrl-C while the agent's Python starts would be a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    command = [sys.executable, *interpreter_options(), "-m", "elaunch", *job["argv"]]
    agent = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM)
    )
    threading.Thread(target=_pass_signals, args=(agent, job["silence_s"]), daemon=True).start()
    code = agent.wait()
    return 255 if code < 0 else code


def _read() -> Any:
    """The launcher's next message; None if it has gone."""
    # Without a buffer, since `select` does not know what is in it.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _refusal(job: dict[str, Any]) -> str:
    """Why this host cannot take part in the job; empty if it can. The job's folder and environment are set."""
    if job["version"] != __version__:
        return f"has elaunch {__version__} in {sys.executable}, and {job['version']} starts the job; install the same"
    folder = job["environ"]["PWD"]
    try:
        os.chdir(folder)
    except OSError as error:
        return f"cannot enter the folder {folder} ({error.strerror}); all hosts need it, as on a shared disk"
    os.environ.update(job["environ"])
    try:
        check_options(parse(job["argv"], os.environ), os.environ)
    except UsageError as error:
        return str(error)
    return ""


def _pass_signals(agent: subprocess.Popen[bytes], silence_s: float) -> None:
    with suppress(ValueError, OSError):
        while select.select([0], [], [], silence_s)[0] and (message := _read()):
            agent.send_signal(message["signal"])
    agent.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
