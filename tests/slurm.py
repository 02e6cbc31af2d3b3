"""A real Slurm for tests: controller, daemons and munge on the nodes of tests/nodes.py, as on a cluster.

Each node has a slurmd and a munge daemon of its own, all with one key. The last node is the login node, with the
controller. Slurm here needs no systemd and touches nothing of an installed Slurm: its configuration is in `folder`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness import RUN_LIMIT_S, environment, wait_for
from tests.nodes import TOOLS, Node, Nodes, address4
from tests.nodes import missing as nodes_missing

_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo", "munged", "unmunge")
# Debian's Slurm needs this in cgroup.conf, although nothing here uses cgroups.
_CGROUP_V1 = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
_CGROUP_V2 = "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n"
# Each node has a /run of its own, so that a daemon's socket there belongs to the node.
_MUNGED = 'mount -t tmpfs -o mode=755 tmpfs /run && mkdir -m 755 /run/munge && exec munged -F --force --key-file="$0"'

_CONF = """\
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
TopologyPlugin=topology/tree
ReturnToService=2
# A job is killed for its time only where elaunch does not end it, however busy the machine is.
KillWait=120
OverTimeLimit=10
JobRequeue=1
InactiveLimit=0
SlurmdTimeout=30
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=2
SchedulerType=sched/builtin
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Each look starts processes, so look seldom.
LOOK_S = 0.1


def missing() -> str:
    """The reason why this machine cannot run Slurm, or the empty string."""
    absent = [name for name in _TOOLS if not shutil.which(name, path=TOOLS["PATH"])]
    return nodes_missing() or (f"not installed: {', '.join(absent)} (`make tools`)" if absent else "")


needs_slurm = pytest.mark.skipif(bool(_why := missing()), reason=_why or "Slurm can be had")


class Slurm:
    """`count` compute nodes with 8 CPUs each, and a login node. Use it as a context manager.

    All nodes see `folder`. Jobs write below `home`, which is also their user's home.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.nodes = Nodes(count + 1)
        self.count = count
        own = {"SLURM_CONF": folder / "slurm.conf", "HOME": self.home, "TMPDIR": folder / "tmp", "PATH": _path()}
        self.env = environment({name: str(value) for name, value in own.items()})
        self._configure()
        try:
            self._start()
        except BaseException:
            self.nodes.close()
            raise

    @property
    def login(self) -> Node:
        """The login node."""
        return self.nodes[self.count]

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()

    def call(self, *command: str, code: int | None = 0, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the login node. Returns its stdout and stderr. Fails if it exits with another code."""
        done = subprocess.run(
            [*self.login.prefix, *command],
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

    def sbatch(self, *words: str) -> Batch:
        """Submit a job. Its output goes to one file, also after a requeue."""
        return Batch(self, self.call("sbatch", "--parsable", *words).strip())

    def wait_idle(self) -> None:
        """Until all nodes can take a job again."""
        idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        wait_for(lambda: self.call(*idle).strip() == str(self.count), "idle nodes", every_s=LOOK_S)

    def slurmd(self, index: int) -> None:
        """Start a node's daemons."""
        node = self.nodes[index]
        self._daemon(node, "sh", "-c", _MUNGED, str(self.folder / "munge.key"))
        self._await_munge(node)
        self._daemon(node, "slurmd", "-D", "-N", node.name)

    def _configure(self) -> None:
        for name in ("home", "state", "tmp", *(f"spool.node{i}" for i in range(self.count))):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        conf = _CONF.format(head=f"node{self.count}", address=address4(self.count), folder=self.folder)
        for i in range(self.count):
            conf += f"NodeName=node{i} NodeAddr={address4(i)} CPUs=8 RealMemory=4000 Gres=gpu:2 State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(conf)
        # Nodes with even numbers are below one switch, and the others below another.
        switches = [f"SwitchName=s{i} Nodes={','.join(f'node{n}' for n in range(i, self.count, 2))}" for i in (0, 1)]
        (self.folder / "topology.conf").write_text("\n".join([*switches, "SwitchName=top Switches=s[0-1]", ""]))
        # The files have to be devices, but no program uses them.
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        (self.folder / "cgroup.conf").write_text(_CGROUP_V2 if is_v2 else _CGROUP_V1)

    def _start(self) -> None:
        self._daemon(self.login, "sh", "-c", _MUNGED, str(self.folder / "munge.key"))
        self._await_munge(self.login)
        self._daemon(self.login, "slurmctld", "-D", "-c")
        for i in range(self.count):
            self.slurmd(i)
        self.wait_idle()

    def _await_munge(self, node: Node) -> None:
        wait_for(lambda: _succeeds([*node.prefix, "munge", "-n"]), f"munge on {node}", every_s=LOOK_S)

    def _daemon(self, node: Node, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            node.popen(*command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)


class Batch:
    """One job of sbatch."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self.slurm = slurm
        self.number = number

    @property
    def state(self) -> str:
        """RUNNING, COMPLETED, …"""
        return self._field("JobState")

    @property
    def output(self) -> str:
        """What it and its steps have printed so far."""
        path = Path(self._field("StdOut"))
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, state: str = "COMPLETED") -> str:
        """Wait until the job is in that state. Returns its output."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"} - {state}

        def is_there() -> bool:
            now = self.state
            assert now not in ends, f"job {self.number} is {now} ({self._field('ExitCode')}):\n{self.output}"
            return now == state

        try:
            wait_for(is_there, f"job {self.number} is {state}", 600, every_s=LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None
        return self.output

    def _field(self, name: str) -> str:
        shown = self.slurm.call("scontrol", "-o", "show", "job", self.number)
        found = re.search(rf"\b{name}=(\S+)", shown)
        assert found, f"no {name} in {shown}"
        return found[1]


def _path() -> str:
    """A PATH with elaunch's own interpreter first, as in an active virtual environment."""
    import sys

    return f"{Path(sys.executable).parent}:{TOOLS['PATH']}"


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, env=os.environ, timeout=RUN_LIMIT_S).returncode == 0
