"""Pods for tests: does with a manifest what a cluster does, on the nodes of tests/nodes.py.

A pod has a network, a host name, a pid namespace and a /dev/shm of its own. Its container is started from the manifest
itself: command, variables, Secrets, claims, and the variables that Kubernetes adds. Names of services are in the
pods' hosts files. A pod is deleted by SIGTERM to its process 1, and SIGKILL after its grace. The pod that replaces it
has the same name and another address. The image is this machine, read-only if the manifest says so. Volumes of the
manifest, and /tmp, are folders in the test's own folder, which can be written.
"""

from __future__ import annotations

import re
import signal
import subprocess
import uuid
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import psutil

from tests.etcd import binary
from tests.faults.meetings import Meeting, Records
from tests.faults.processes import Watched
from tests.harness import DEADLINE_S, wait_for
from tests.manifests import ALL, K8S, Object, open_ports
from tests.nodes import Node, Nodes

NAMESPACE = "team"
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# Every file system but the kernel's, /dev/shm and the test's folder.
READ_ONLY = """
mount --bind "$1" "$1"
while read -r _ place type _; do
    case $type in proc | sysfs | cgroup* | dev* | mqueue) continue ;; esac
    case $place in "$1" | /dev/shm) continue ;; esac
    mount -o remount,bind,ro "$place"
done </proc/self/mounts
if [ -w "$2" ]; then echo "the image can be written" >&2; exit 1; fi
shift 2
exec "$@"
"""
# The container has no capabilities and cannot gain any. It still runs as root, to be able to enter the tests' folders.
RIGHTS = ("setpriv", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs")
# The variables of the cluster's services that every container has.
SERVICES = {
    "ipv4": {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"},
    "ipv6": {"KUBERNETES_SERVICE_HOST": "fd00:96::1", "KUBERNETES_SERVICE_PORT": "443"},
}
# Commands that remove a pod's addresses of the other family, as in a cluster with one family only.
ONLY = {
    "ipv4": "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6",
    "ipv6": "ip -4 address flush dev eth0",
}
_VARIABLE = re.compile(r"\$\$|\$\((\w+)\)")


class Pod:
    """One life of a pod; `owner` is its Job or StatefulSet."""

    def __init__(self, owner: Object, ordinal: int, node: Node, family: str) -> None:
        self.owner, self.ordinal, self.node = owner, ordinal, node
        self.address: str = getattr(node, family)
        self.name = f"{owner['metadata']['name']}-{ordinal}"
        self.spec: Object = owner["spec"]["template"]["spec"]
        service = self.spec.get("subdomain") or owner["spec"].get("serviceName")
        domain = f"{service}.{NAMESPACE}.svc.cluster.local"
        parts = domain.split(".")
        # All forms of the name that a resolver with the pod's search list finds.
        self.names = [f"{self.name}.{'.'.join(parts[:count])}" for count in (len(parts), 3, 2, 1)]

    @property
    def labels(self) -> Object:
        """The pod's labels, without those that Kubernetes adds."""
        return self.owner["spec"]["template"].get("metadata", {}).get("labels", {})

    @property
    def line(self) -> str:
        return f"{self.address}\t{' '.join(self.names)}\t{self.name}"


class JobPod(Pod):
    """A pod of a Job that runs elaunch."""

    process: Watched

    @property
    def first(self) -> psutil.Process:
        """Process 1 of the pod, by its pid outside of the pod."""
        return wait_for(lambda: next(iter(psutil.Process(self.process.process.pid).children()), None), "process 1")


class Pods:
    """A cluster with room for `places` pods, one after another; use it as a context manager.

    `secrets` are the namespace's: the texts of their keys. `family`, ipv4 or ipv6, is the only one that pods have.
    """

    def __init__(
        self, folder: Path, places: int, secrets: Mapping[str, Mapping[str, str]], *, family: str = "ipv4"
    ) -> None:
        self.folder = folder
        self._family = family
        self.records = Records(folder / "records")
        self._secrets = secrets
        self._uids: dict[str, str] = {}
        self._now: dict[str, Pod] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._jobs: list[Watched] = []
        self._etcds: dict[str, subprocess.Popen[str]] = {}
        self.nodes = Nodes(places)
        self._free = list(self.nodes)
        for node in self.nodes:
            node.run("sh", "-c", ONLY[family])

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.__exit__()
        self.nodes.close()

    def run(
        self, owner: Object, ordinal: int, *args: str, env: Mapping[str, str] | None = None, node: Node | None = None
    ) -> JobPod:
        """Start a pod of elaunch with these arguments instead of the manifest's. `env` are further variables.

        The pod runs on `node`, or on a node that has had no pod yet.
        """
        pod = JobPod(owner, ordinal, node or self._free.pop(0), self._family)
        self._enter(pod)
        home = self.folder / f"life-{len(self._jobs)}-of-{pod.name}"
        home.mkdir()
        command, variables = self._container(pod, home)
        assert command[0] == "elaunch"
        index = {"JOB_COMPLETION_INDEX": str(ordinal)} if owner.get("kind", "Job") == "Job" else {}
        extra = {**SERVICES[self._family], **index, **(env or {})}
        prefix = (*pod.node.prefix, *self._isolation(pod))
        pod.process = Watched(home, *args, env={**variables, **extra}, prefix=prefix)
        self._jobs.append(pod.process)
        return pod

    def run_etcd(self, stateful_set: Object, ordinal: int) -> Pod:
        """Start a StatefulSet's pod; its claims keep what an earlier one of its name has written."""
        pod = Pod(stateful_set, ordinal, self._free.pop(0), self._family)
        self._enter(pod)
        command, variables = self._container(pod, self.folder)
        assert command[0] == "etcd"
        with (self.folder / f"{pod.name}.log").open("a") as log:
            self._etcds[pod.name] = pod.node.popen(
                *self._isolation(pod), binary("3.4"), *command[1:], env=variables, stdout=log, stderr=log
            )
        return pod

    def delete(self, pod: JobPod) -> int:
        """As `kubectl delete pod`; the container's exit code."""
        pod.first.send_signal(signal.SIGTERM)
        try:
            return pod.process.wait(pod.spec["terminationGracePeriodSeconds"])
        except AssertionError:
            pod.first.kill()
            return pod.process.wait(DEADLINE_S)

    def lose(self, pod: Pod) -> None:
        """The pod's machine loses its power. No further packet leaves it."""
        pod.node.power_off()

    def enforce(self, *policies: Object) -> Node:
        """From now on the network obeys these policies between the present pods. Returns a node for a stranger.

        The first packet of a connection that they forbid is dropped.
        """
        stranger = self._free.pop(0)
        pods = [*((pod.address, pod.labels) for pod in self._now.values()), (getattr(stranger, self._family), {})]
        kind = "ip6" if self._family == "ipv6" else "ip"
        rules = []
        for (source, labels), (target, others) in permutations(pods, 2):
            ports = open_ports(policies, labels, others)
            way = f"{kind} saddr {source} {kind} daddr {target} tcp flags & (syn | ack) == syn"
            if ports is not ALL:
                rules.append(f"{way} tcp dport != {{ {', '.join(map(str, ports))} }}" if ports else way)
        self.nodes.refuse(*rules)
        return stranger

    def meeting(self, *ordinals_of: JobPod, after: Meeting | None = None) -> Meeting:
        """The newest generation, once these pods' workers, one each, have met."""
        oldest = after.generation + 1 if after else 0
        count = len(ordinals_of)
        try:
            found = wait_for(lambda: self.records.meeting(count, oldest), f"{count} ranks meet in {oldest} or later")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        self.records.check(found, self._addresses)
        assert sorted(found.hosts) == sorted(pod.name for pod in ordinals_of)
        return found

    def goes_on(self, meeting: Meeting) -> None:
        """Wait until that generation has recorded more; fail if a newer one started."""
        since = len(self.records.all())
        wait_for(lambda: len(self.records.of("step", since=since)) > 3 * len(meeting.records), "training goes on")
        assert not [r for r in self.records.of("started") if r["generation"] > meeting.generation], self.story()

    def ask(self, what: str, *, generation: int, rank: int) -> None:
        """Have a rank fail: see reducer.py. (Workers print the pids that they have inside of their pods.)"""
        partial = self.folder / ".asked"
        partial.write_text(what)
        partial.rename(self.folder / f"step-{generation}-{rank}")

    def end(self, *pods: JobPod) -> None:
        """Let the training end. These pods must end with exit code 0, and leave nothing."""
        (self.folder / "end").touch()
        for pod in pods:
            assert pod.process.wait(DEADLINE_S) == 0, self.story()
            pod.process.assert_nothing_is_left()
            assert not pod.node.shared_memory()

    def story(self) -> str:
        """The output of all containers, to find out why a test failed."""
        logged = [f"--- {job.process.args}:\n{job.stderr}" for job in self._jobs]
        return "\n".join([*logged, *(str(r) for r in self.records.of() if r["event"] != "step")])

    def _enter(self, pod: Pod) -> None:
        """Give the pod's name to its own place only, and notify all other pods."""
        self._now[pod.name] = pod
        self._addresses[pod.name] = (pod.address, *pod.names)
        pod.node.run("sh", "-c", 'echo "$1" >/proc/sys/kernel/hostname', "_", pod.name)
        known = "".join(f"{each.line}\n" for each in self._now.values())
        for each in self._now.values():
            if each.node.is_on:
                text = f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{known}"
                each.node.run("sh", "-c", 'printf %s "$1" >/etc/hosts', "_", text)

    def _isolation(self, pod: Pod) -> tuple[str, ...]:
        """The words before the container's command."""
        (container,) = pod.spec["containers"]
        read_only = ("sh", "-euc", READ_ONLY, "image", str(self.folder), str(K8S))
        is_read_only = container["securityContext"].get("readOnlyRootFilesystem")
        return (*NAMESPACES, *(read_only if is_read_only else ()), *RIGHTS)

    def _container(self, pod: Pod, home: Path) -> tuple[list[str], dict[str, str]]:
        """The command and the variables of its one container, with its volumes in folders of this machine."""
        (container,) = pod.spec["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        places = self._volumes(pod, container, home)
        variables: dict[str, str] = {}
        for each in container.get("env", []):
            value = each["value"] if "value" in each else self._value(pod, each["valueFrom"])
            variables[each["name"]] = self._placed(_expanded(value, variables), places)
        words = [*container["command"], *container.get("args", [])]
        return [self._placed(_expanded(word, variables), places) for word in words], variables

    def _value(self, pod: Pod, source: Object) -> str:
        match source:
            case {"fieldRef": {"fieldPath": "metadata.name"}}:
                return pod.name
            case {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}:
                return self._uids.setdefault(pod.owner["metadata"]["name"], str(uuid.uuid4()))
            case {"secretKeyRef": {"name": name, "key": key}}:
                return self._secrets[name][key]
            case {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}:
                return f"zone-{pod.ordinal % 2}"
        raise AssertionError(f"what is {source}?")

    def _volumes(self, pod: Pod, container: Object, home: Path) -> dict[str, str]:
        """The folder of this machine for each place of a volume; /dev/shm is the node's own."""
        claims = {each["metadata"]["name"] for each in pod.owner["spec"].get("volumeClaimTemplates", [])}
        volumes = {each["name"]: each for each in pod.spec.get("volumes", [])}
        places: dict[str, str] = {}
        for mount in container.get("volumeMounts", []):
            folder = self.folder / "volumes" / pod.name / mount["name"]
            volume = volumes.get(mount["name"], {})
            if "emptyDir" in volume:
                assert mount["mountPath"] in ("/tmp", "/dev/shm")
                if mount["mountPath"] == "/tmp":
                    # TMPDIR names it.
                    places["/tmp"] = str(home / "tmp")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            places[mount["mountPath"]] = str(folder)
            if "secret" in volume:
                for key, text in self._secrets[volume["secret"]["secretName"]].items():
                    (folder / key).write_text(text)
            else:
                assert mount["name"] in claims, f"nothing is mounted at {mount['mountPath']}"
        return places

    def _placed(self, text: str, places: Mapping[str, str]) -> str:
        if not places:
            return text
        # One replacement for all places: the folder of one place may contain the path of another.
        return re.sub(rf"(?<![\w/])({'|'.join(map(re.escape, places))})(?=/|$)", lambda found: places[found[1]], text)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)`, as the kubelet expands it; `$$` is a dollar."""
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[0]) if found[1] else "$", text)
