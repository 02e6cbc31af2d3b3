"""`elaunch --hosts` with real sshd's, each on a node of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import elaunch
from elaunch.agent.linux import catches
from tests.harness import COMMAND, DEADLINE_S, FRESH, Job, environment, free_ports, script, wait_for, with_limits
from tests.nodes import Node, Nodes, needs_nodes

pytestmark = [needs_nodes, pytest.mark.servers]

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
# The node's own home and login shell of root, and the folder that sshd needs.
START = """
mount -t tmpfs tmpfs /run && mkdir /run/sshd
printf 'root:x:0:0::%s:%s\\nsshd:x:100:65534::/run/sshd:/bin/false\\n' "$1" "$2" >/run/passwd
mount --bind /run/passwd /etc/passwd
exec "$3" -D -e -f "$4"
"""
WAITS = """
import os, sys, time
words = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "HF_WORD", "OWN")]
print("rank {} of {} {} {}".format(*words), flush=True)
if sys.argv[1:] == ["wait"]:
    open(f"up-{os.environ['RANK']}-{os.environ['ELAUNCH_GENERATION']}", "w").close()
    if os.environ["WORLD_SIZE"] != "1":
        time.sleep(600)
"""
# For less than the 10 s that a hook has.
ENDS_SLOWLY = """
import json, sys, time
if json.load(sys.stdin)["event"] == "end":
    open("hook-begins", "w").close()
    time.sleep(7)
    open("hook-ends", "w").close()
"""
STARTS_SLOWLY = """
import os, sys, time
if "--scheduler" in sys.orig_argv:
    open(f"starts-{os.getpid()}", "w").close()
    time.sleep(2)
"""
# Passes bytes on after 100 ms in each direction.
RELAY = """
import collections, os, select, socket, sys, time
link = socket.create_connection(sys.argv[1:3])
queue = collections.deque()
open_ends = {0, link.fileno()}
while open_ends or queue:
    wait_s = max(0, queue[0][0] - time.monotonic()) if queue else None
    for end in select.select(open_ends, [], [], wait_s)[0]:
        data = os.read(end, 1 << 16)
        queue.append((time.monotonic() + 0.1, end, data))
        if not data:
            open_ends.discard(end)
    while queue and queue[0][0] <= time.monotonic():
        _, end, data = queue.popleft()
        if not data:
            sys.exit() if end else link.shutdown(socket.SHUT_WR)
        elif end:
            os.write(1, data)
        else:
            link.sendall(data)
"""
# An ssh that starts nothing. The host's name is what it does.
NO_SSH = """
import subprocess, sys
host, mark = sys.argv[-2], sys.argv[-1].split()[-1]
if host == "floods":
    for _ in range(1 << 10):
        sys.stdout.write("x" * (1 << 17))
    open("flooded", "w").close()
replies = {"list": "[1]", "null": "null", "deep": "[" * 100_000, "other": "{}", "full": '{"refusal": "is full"}'}
if host not in replies:
    subprocess.run(["sleep", "600"])
sys.stdin.readline()
print("", mark + replies[host], sep="\\n", flush=True)
sys.stdin.read()
"""


class Hosts:
    """Nodes with an sshd each, and the options by which elaunch on node 0 reaches them."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self.nodes, self._folder = nodes, folder
        for name in ("host_key", "key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=DEADLINE_S
            )
        config = folder / "ssh_config"
        config.write_text(
            f"User root\nIdentityFile {folder}/key\nIdentitiesOnly yes\nGlobalKnownHostsFile {folder}/known\n"
            "UserKnownHostsFile /dev/null\nGSSAPIAuthentication no\n"
        )
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known").write_text(f"* {host_key}")
        self.options = ("--ssh-command", f"ssh -F {config}", *FRESH)

    def serve(self, node: Node, *, shell: str = "/bin/bash", prints: str = "", key: bool = True) -> None:
        """Start the node's sshd, with this login shell and a text that it and the banner print."""
        home = self._folder / f"home-{node.name}"
        home.mkdir()
        # bash reads it for each command of ssh's, tcsh its own.
        (home / ".bashrc").write_text(f"echo {prints}; printf {prints}" if prints else "")
        (home / "banner").write_text(f"{prints}\n")
        config = home / "sshd_config"
        config.write_text(
            f"HostKey {self._folder}/host_key\nAuthorizedKeysFile {self._folder / 'key.pub' if key else 'none'}\n"
            f"StrictModes no\nPidFile none\nUsePAM no\n{f'Banner {home}/banner' if prints else ''}\n"
        )
        arguments = ("sshd", str(home), shell, SSHD or "", str(config))
        process = node.popen("sh", "-c", START, *arguments, stderr=subprocess.PIPE)
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        assert any("listening" in line for line in lines), f"sshd on {node} has not started"

    def job(self, folder: Path, *args: str, **more: object) -> Job:
        return Job(folder, *self.options, *args, prefix=self.nodes[0].prefix, **more)  # type: ignore[arg-type]

    def add_ssh_option(self, line: str) -> None:
        with (self._folder / "ssh_config").open("a") as config:
            config.write(f"{line}\n")

    def is_idle(self) -> None:
        """Wait until nothing of elaunch or ssh is left."""
        wait_for(lambda: not [each for node in self.nodes for each in self.agents(node)], "nothing is left")

    def agents(self, node: Node) -> list[psutil.Process]:
        """All of elaunch and its workers on the node."""
        return [each for each in node.processes() if "sshd" not in name_of(each)]


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "sshd"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    made: list[Nodes] = []

    def start(count: int) -> Hosts:
        folder = tmp_path / "ssh"
        folder.mkdir(mode=0o700)
        made.append(Nodes(count))
        return Hosts(folder, made[-1])

    yield start
    for nodes in made:
        nodes.close()


def test_one_command_starts_the_job_on_three_hosts(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(3)
    cluster.serve(cluster.nodes[1], prints="hello")
    cluster.serve(cluster.nodes[2], shell="/bin/tcsh")
    word = "it's $HOME `x` !1"
    # tcsh replaces an exclamation mark in quotes too.
    folder, python = tmp_path / word, tmp_path / f"{word.partition('!')[0]}env"
    folder.mkdir()
    python.symlink_to(sys.prefix)
    script(folder, WAITS)
    for other in (folder, *tmp_path.glob("ssh/home-*")):
        script(other, "raise SystemExit('not for elaunch')", "json.py")
    Quoted = type("Quoted", (Job,), {"command": (f"{python}/bin/python", "-m", "elaunch")})
    # The user's own login came through a tunnel.
    login = {"SSH_CONNECTION": "127.0.0.1 2201 127.0.0.1 22"}
    words = {"HF_WORD": word, "OWN": "a", "NOT_SENT": "b", **login}
    args = (*cluster.options, "--hosts", "node0,node1:2,node2", "--ssh-env", "OWN,NONE", "train.py")
    with Quoted(folder, *args, env=words, prefix=cluster.nodes[0].prefix) as job:
        assert job.wait() == 0
        assert sorted(job.stdout.splitlines()) == [f"[{r}] rank {r} of 4 {word} a" for r in range(4)]
        assert "hello" not in job.output
        assert job.stderr.count("generation 0") == 1
        assert "--ssh-env: NONE is not set here" in job.stderr


def test_each_host_that_cannot_take_part_is_named_with_its_reason(
    tmp_path: Path, hosts: Callable[[int], Hosts]
) -> None:
    cluster = hosts(6)
    folder = tmp_path / "disk" / "job"
    folder.mkdir(parents=True)
    script(folder, WAITS)
    _, no_key, no_folder, no_python, other, unreachable = cluster.nodes
    python, package = Path(sys.executable), Path(elaunch.__file__)
    (tmp_path / "package.py").write_text(package.read_text().replace(elaunch.__version__, "0.0.1"))
    no_folder.run("mount", "-t", "tmpfs", "tmpfs", str(folder.parent))
    no_python.run("mount", "-t", "tmpfs", "tmpfs", str(python.parent))
    other.run("mount", "--bind", str(tmp_path / "package.py"), str(package))
    for node in (no_key, no_folder, no_python, other):
        cluster.serve(node, key=node is not no_key)
    unreachable.link_down()
    names = ",".join(node.name for node in cluster.nodes)
    with cluster.job(folder, "--hosts", f"{names},nohost", "train.py", "wait") as job:
        assert job.wait() == 3
        sentences = dict(re.findall(r"^elaunch: (\w+): (.*)$", job.stderr, re.M))
        assert "elaunch: no host has started" in job.stderr
    assert "Permission denied" in sentences["node1"]
    assert "ssh-copy-id node1" in sentences["node1"]
    assert f"cannot enter the folder {folder}" in sentences["node2"]
    assert f"{python} -m elaunch does not start there (exit code 127: " in sentences["node3"]
    assert f"has elaunch 0.0.1 in {python}, and {elaunch.__version__} starts the job" in sentences["node4"]
    assert re.search("ssh failed .*(timed out|No route to host)", sentences["node5"])
    assert "Could not resolve hostname" in sentences["nohost"]
    assert len(sentences) == 6
    assert not list(folder.glob("up-*"))
    cluster.is_idle()


def test_what_is_no_reply_of_elaunch_costs_its_host_a_sentence(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(1)
    ssh = f"{sys.executable} {script(tmp_path, NO_SSH, 'ssh.py')}"
    args = ("--ssh-command", ssh, script(tmp_path, WAITS).name)
    with cluster.job(tmp_path, "--hosts", "node0,list,null,deep,other,full", *args) as job:
        assert job.wait() == 2
    sentences = dict(re.findall(r"^elaunch: (\w+): (.*)$", job.stderr, re.M))
    assert sentences.pop("full") == "is full"
    assert [*sentences] == ["list", "null", "deep", "other"]
    assert all("its reply is not that of elaunch" in sentence for sentence in sentences.values())
    with cluster.job(tmp_path, "--hosts", "node0,floods", *args) as job:
        wait_for((tmp_path / "flooded").exists, "all 128 MiB are written")
        assert psutil.Process(job.process.pid).memory_info().rss < 100 << 20
        job.process.terminate()
        assert job.wait() == 143
    with cluster.job(tmp_path, "--hosts", "slow[0-39]", *args) as job:
        found = job.wait_for_output(r"^elaunch: waiting for slow0, .*\(ssh\)$")
        assert "slow39" not in found[0]
        job.process.terminate()
        assert job.wait() == 143
    cluster.is_idle()


def test_many_logins_at_once_are_not_refused(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    cluster.add_ssh_option(f"Host a*\nHostName {cluster.nodes[1].ipv4}")
    with cluster.job(tmp_path, "--hosts", "a[0-39]", "none.py") as job:
        assert job.wait() == 2
        assert job.stderr.count("none.py does not exist") == 40


def test_equal_lines_of_the_ranks_of_all_hosts_are_shown(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    program = script(tmp_path, "import sys\nprint('a line\\n', file=sys.stderr)").name
    prefix = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${local_rank}: "}
    with cluster.job(tmp_path, "--hosts", "node0,node1", program, env=prefix) as job:
        assert job.wait() == 0
        assert job.stderr.splitlines().count("0: a line") == 2
    of_host = ("--log-line-prefix-template", "${hostname}: ")
    with cluster.job(tmp_path, "--hosts", "node0,node1", *of_host, program, env=prefix) as job:
        assert job.wait() == 0
        assert {"node0: a line", "node1: a line"} <= {*job.stderr.splitlines()}
    with cluster.job(tmp_path, "--hosts", "node0,node1", "--tee", "3", "--log-dir", "logs", program) as job:
        assert job.wait() == 0
        assert [job.stderr.splitlines().count(f"[default0]:{line}") for line in ("a line", "")] == [2, 2]


def test_each_hosts_rank_that_raises_waits_for_an_ide(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    program = script(tmp_path, "raise ValueError").name
    with cluster.job(tmp_path, "--hosts", "node0,node1", "--debug-on-error", "any", program) as job:
        for rank in (0, 1):
            job.wait_for_output(rf'rank {rank}: pid .* waits for an IDE.*"type": "debugpy".*"port": 5678')
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_the_command_ends_the_job_on_every_host(
    tmp_path: Path, hosts: Callable[[int], Hosts], signum: int, code: int
) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    with cluster.job(
        tmp_path, "--hosts", "node0,node1", "--stop-grace", "5", script(tmp_path, WAITS).name, "wait"
    ) as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 2, "the workers run")
        job.process.send_signal(signum)
        assert job.wait() == code
        cluster.is_idle()


def test_ctrl_c_while_python_starts_for_the_agents_ends_the_job_without_a_traceback(
    tmp_path: Path, hosts: Callable[[int], Hosts]
) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    script(tmp_path, STARTS_SLOWLY, "sitecustomize.py")
    args = ("--hosts", "node0,node1", script(tmp_path, WAITS).name)
    with cluster.job(tmp_path, *args, env={"PYTHONPATH": str(tmp_path)}) as job:
        wait_for(lambda: len(list(tmp_path.glob("starts-*"))) == 2, "both agents start")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert job.stderr == ""
    cluster.is_idle()


def test_a_hangup_that_is_ignored_here_does_not_reach_the_hosts(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    shell = f"trap '' HUP; exec {' '.join(COMMAND)} \"$@\""
    Nohup = type("Nohup", (Job,), {"command": ("sh", "-c", shell, "sh")})
    args = (*cluster.options, "--hosts", "node0,node1", script(tmp_path, WAITS).name, "wait")
    with Nohup(tmp_path, *args, prefix=cluster.nodes[0].prefix) as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 2, "the workers run")
        assert catches(job.process.pid, signal.SIGTERM)
        assert not catches(job.process.pid, signal.SIGHUP)


@pytest.mark.parametrize("stderr", [None, subprocess.STDOUT])
def test_the_job_ends_without_a_reader(tmp_path: Path, hosts: Callable[[int], Hosts], stderr: int | None) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    program = script(tmp_path, WAITS.replace("flush=True", "file=sys.stderr") if stderr else WAITS).name
    args = (*COMMAND, *cluster.options, "--hosts", "node0,node1", program, "wait")
    process = cluster.nodes[0].popen(*args, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 141
    cluster.is_idle()


def test_a_job_that_needs_all_its_hosts_ends_with_the_first_that_is_lost(
    tmp_path: Path, hosts: Callable[[int], Hosts]
) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    with cluster.job(tmp_path, "--hosts", "node0,node1", script(tmp_path, WAITS).name, "wait") as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 2, "the workers run")
        [agent] = [each for each in cluster.agents(cluster.nodes[1]) if "--scheduler" in each.cmdline()]
        agent.kill()
        assert job.wait() == 1
        assert "node1: the connection, or elaunch there, has ended (exit code 255); the job needs 2" in job.stderr
        assert job.stderr.splitlines()[-1] == "elaunch: stopped, since the job needs 2 nodes; exit code 1"
    cluster.is_idle()


def test_the_exit_code_is_that_of_an_agent_at_the_jobs_end(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(3)
    (tmp_path / "logs").mkdir()
    cluster.nodes[0].run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path / "logs"))
    for node in (cluster.nodes[1], cluster.nodes[2]):
        cluster.serve(node)
    hook = f"{sys.executable} {script(tmp_path, ENDS_SLOWLY, 'hook.py')}"
    with cluster.job(tmp_path, "--hosts", "node1,node2", "--on-event", hook, script(tmp_path, WAITS).name) as job:
        wait_for((tmp_path / "hook-begins").exists, "an agent runs the hook")
        wait_for(lambda: len(cluster.nodes[0].processes()) == 2, "the other host's agent has ended")
        [ssh] = [each for each in cluster.nodes[0].processes() if name_of(each) == "ssh"]
        ssh.kill()
        assert job.wait() == 0
        assert "the connection, or elaunch there" not in job.stderr
    endpoint = f"node1:{free_ports(1)[0]}"
    args = ("--hosts", "node0,node1", "--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--log-dir", "logs", "train.py")
    with cluster.job(tmp_path, *args) as job:
        assert job.wait() == 0
        assert "logs: no folder can be made in it (Read-only file system)" in job.stderr
    script(tmp_path, "raise SystemExit(2)")
    with cluster.job(tmp_path, "--hosts", "node1,node2", "--no-restart-codes", "2", "train.py") as job:
        assert job.wait() == 2
        assert "the connection, or elaunch there" not in job.stderr


def test_the_last_hook_has_its_time_after_a_signal(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(1)
    hook = f"{sys.executable} {script(tmp_path, ENDS_SLOWLY, 'hook.py')}"
    args = ("--hosts", "node0", "--nproc-per-node", "2", "--stop-grace", "0", "--on-event", hook)
    with cluster.job(tmp_path, *args, script(tmp_path, WAITS).name, "wait") as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 2, "the workers run")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
    assert (tmp_path / "hook-ends").exists()


def test_hosts_that_the_network_cuts_off_end_the_job(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(3)
    for node in (cluster.nodes[1], cluster.nodes[2]):
        cluster.serve(node)
    silence_s = 4.0
    Limited = with_limits({"elaunch.launcher.hosts.command._SILENCE_S": silence_s})
    program = script(tmp_path, WAITS.replace("    open(", f"    time.sleep({silence_s} + 1)\n    open(", 1)).name
    ssh = ("--ssh-command", f"{cluster.options[1]} -o ServerAliveInterval=1", *FRESH)
    with Limited(tmp_path, *ssh, "--hosts", "node1,node2", program, "wait", prefix=cluster.nodes[0].prefix) as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 2, "heartbeats keep the job running")
        cluster.nodes[0].unplug()
        cluster.is_idle()
        assert job.wait() == 1


@pytest.mark.parametrize("name", ["ssh", "sshd"])
def test_a_host_whose_connection_ends_is_a_lost_node(tmp_path: Path, hosts: Callable[[int], Hosts], name: str) -> None:
    cluster = hosts(3)
    for node in (cluster.nodes[1], cluster.nodes[2]):
        cluster.serve(node)
    args = ("--hosts", "node[0-2]", "--nnodes", "1:3", script(tmp_path, WAITS).name, "wait")
    with cluster.job(tmp_path, *args) as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 3, "the workers run")
        where, is_meant = (0, "node1") if name == "ssh" else (1, "@notty")
        [victim] = [
            each
            for each in cluster.nodes[where].processes()
            if name_of(each) in (name, f"{name}-session") and is_meant in " ".join(each.cmdline())
        ]
        victim.kill()
        wait_for(lambda: len(list(tmp_path.glob("up-*-1"))) == 2, "two nodes go on")
        wait_for(lambda: not cluster.agents(cluster.nodes[1]), "the lost node's agent has ended")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert "elaunch: node1: the connection, or elaunch there, has ended" in job.stderr


def test_no_process_argument_or_shell_has_the_secret(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    secret = "a secret of this test"
    args = ("--hosts", "node0,node1", script(tmp_path, WAITS).name, "wait")
    with cluster.job(tmp_path, *args, env={"ELAUNCH_TOKEN": secret}) as job:
        wait_for(lambda: len(list(tmp_path.glob("up-*-0"))) == 2, "the workers run")
        processes = cluster.nodes.processes()
        assert not [each for each in processes if secret in " ".join(each.cmdline())]
        # The agent has it, and no other process there.
        holders = {each.pid for each in cluster.nodes[1].processes() if secret in each.environ().values()}
        agents = [
            each.pid for each in cluster.nodes[1].processes() if each.cmdline()[-4:-2] == ["--scheduler", "hosts"]
        ]
        assert holders <= set(agents)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130


def test_a_host_behind_a_slow_and_lossy_line_takes_part(tmp_path: Path, hosts: Callable[[int], Hosts]) -> None:
    cluster = hosts(2)
    cluster.serve(cluster.nodes[1])
    cluster.nodes.lose(2)
    cluster.add_ssh_option(f"ProxyCommand {sys.executable} {script(tmp_path, RELAY, 'relay.py')} %h %p")
    with cluster.job(tmp_path, "--hosts", "node0,node1", script(tmp_path, WAITS).name) as job:
        assert job.wait() == 0
        assert "[1] rank 1 of 2" in job.stdout
