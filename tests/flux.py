"""A real Flux for tests: one broker on each of the nodes of tests/nodes.py, as on a cluster.

Debian has no package of Flux, so the tests use a flux-core on the PATH. (Build it from source into a folder of its own;
https://flux-framework.org. It needs nothing else.) Its configuration and its sockets are in `folder`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import RUN_LIMIT_S, environment, wait_for
from tests.nodes import TOOLS, Node, Nodes
from tests.nodes import missing as nodes_missing

_CONF = """\
[bootstrap]
curve_cert = "{folder}/curve.cert"
default_port = 8050
default_bind = "tcp://eth0:%p"
default_connect = "tcp://%h:%p"
hosts = [{{ host = "node[0-{last}]" }}]

[resource]
noverify = true

[[resource.config]]
hosts = "node[0-{last}]"
cores = "0-{last_core}"
"""


def missing() -> str:
    """The reason why this machine cannot run Flux, or the empty string."""
    return nodes_missing() or ("" if shutil.which("flux") else "not installed: flux (flux-core, on the PATH)")


needs_flux = pytest.mark.skipif(bool(_why := missing()), reason=_why or "Flux can be had")


class Flux:
    """`count` nodes with a broker each; people type on the first one. Use it as a context manager.

    What jobs write is below `home`, which is also their user's home.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.count = count
        path = f"{Path(sys.executable).parent}:{TOOLS['PATH']}"
        own = {"HOME": str(self.home), "TMPDIR": str(folder), "PATH": path, "FLUX_URI": self._uri(0)}
        self.env = environment(own)
        self.nodes = Nodes(count)
        try:
            self._start()
        except BaseException:
            self.nodes.close()
            raise

    def __enter__(self) -> Flux:
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()

    def call(self, *command: str, code: int | None = 0, env: dict[str, str] | None = None) -> str:
        """What a command prints that is typed on the first node; stderr too. Fails if it exits with another code."""
        done = subprocess.run(
            [*self.nodes[0].prefix, *command],
            cwd=self.home,
            env={**self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
        )
        assert code in (None, done.returncode), f"{command} exited with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def wait(self, job: str, code: int) -> None:
        """Until a job has ended, with that exit code."""
        self.call("flux", "job", "status", job.strip(), code=code)

    def wait_idle(self) -> None:
        """Until no job runs."""
        wait_for(lambda: not self.call("flux", "jobs", "--no-header"), "no job of Flux")

    def _start(self) -> None:
        (self.folder / "config").mkdir()
        conf = _CONF.format(folder=self.folder, last=self.count - 1, last_core=(os.cpu_count() or 1) - 1)
        (self.folder / "config" / "flux.toml").write_text(conf)
        subprocess.run(
            ["flux", "keygen", str(self.folder / "curve.cert")], check=True, env=self.env, timeout=RUN_LIMIT_S
        )
        for i, node in enumerate(self.nodes):
            self._broker(node, i)
        free = ("flux", "resource", "list", "--states=free", "--no-header", "--format={nnodes}")
        wait_for(lambda: self.call(*free, code=None).strip() == str(self.count), "nodes that are free")

    def _broker(self, node: Node, rank: int) -> None:
        # The first broker's second phase runs the user's commands. Here it only waits until it is ended.
        command = ["flux", "broker", f"--config-path={self.folder / 'config'}", f"-Slocal-uri={self._uri(rank)}"]
        with (self.folder / "brokers.log").open("ab") as log:
            node.popen(
                *command, *(["sleep", "infinity"] if rank == 0 else []),
                env={name: value for name, value in self.env.items() if name != "FLUX_URI"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip

    def _uri(self, rank: int) -> str:
        return f"local://{self.folder}/broker{rank}"
