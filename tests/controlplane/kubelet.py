"""As much of a kubelet as these tests need, for all nodes at once: it runs the pods that the scheduler puts on them."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
from contextlib import suppress
from dataclasses import dataclass

from tests.controlplane.plane import PATCH, Api
from tests.harness import joined
from tests.manifests import Object
from tests.nodes import Node
from tests.pods import NAMESPACE, JobPod, Pods

_ROUND_S = 0.1
_BEAT_S = 2.0
_ROOM = {"cpu": "8", "memory": "8Gi", "pods": "10"}


@dataclass
class _Running:
    """A pod that was started, and since when it is asked to end."""

    pod: JobPod
    stopped_at_s: float | None = None
    is_told: bool = False


class Kubelets:
    """Serves `pods`' nodes from a thread; use it as a context manager.

    Pods are those of `owner`; they run `program` in place of their arguments. A node without power is silent.
    """

    def __init__(self, api: Api, pods: Pods, owner: Object, *program: str) -> None:
        self._api, self._pods, self._owner, self._program = api, pods, owner, program
        self._running: dict[str, _Running] = {}
        self._beaten_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self.troubles: list[str] = []

    def __enter__(self) -> Kubelets:
        for node in self._pods.nodes:
            self._api.ask("POST", "/api/v1/nodes", {"metadata": {"name": node.name}})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        joined(self._thread)

    def running(self, name: str) -> JobPod | None:
        """The pod of that name that runs now."""
        return next((r.pod for r in list(self._running.values()) if r.pod.name == name and _lives(r)), None)

    def _serve(self) -> None:
        while not self._is_over.wait(_ROUND_S):
            try:
                self._round(time.monotonic())
            except (OSError, AssertionError) as error:
                self.troubles.append(repr(error))

    def _round(self, now_s: float) -> None:
        alive = {node.name: node for node in self._pods.nodes if node.is_on}
        if now_s > self._beaten_s + _BEAT_S:
            self._beaten_s = now_s
            for node in alive.values():
                self._beat(node)
        for each in self._api.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]:
            if each["spec"].get("nodeName") in alive:
                self._attend(each, alive[each["spec"]["nodeName"]], now_s)

    def _attend(self, seen: Object, node: Node, now_s: float) -> None:
        metadata = seen["metadata"]
        known = self._running.get(metadata["uid"])
        if known is None and "deletionTimestamp" not in metadata:
            ordinal = int(metadata["name"].rpartition("-")[2])
            pod = self._pods.run(self._owner, ordinal, *self._program, node=node)
            known = self._running[metadata["uid"]] = _Running(pod)
        if known and not known.is_told and _lives(known):
            self._tell(seen, node, {"running": {}})
            known.is_told = True
        if "deletionTimestamp" in metadata:
            self._end(known, seen, now_s)

    def _end(self, known: _Running | None, seen: Object, now_s: float) -> None:
        """SIGTERM; SIGKILL when its grace is over; gone when it has ended."""
        if known and _lives(known):
            if known.stopped_at_s is None:
                known.stopped_at_s = now_s
                known.pod.first.send_signal(signal.SIGTERM)
            elif now_s > known.stopped_at_s + seen["metadata"].get("deletionGracePeriodSeconds", 30):
                known.pod.first.kill()
            return
        now = {"gracePeriodSeconds": 0, "preconditions": {"uid": seen["metadata"]["uid"]}}
        with suppress(urllib.error.HTTPError):
            self._api.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{seen['metadata']['name']}", now)

    def _tell(self, seen: Object, node: Node, state: Object) -> None:
        conditions = [{"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")]
        (container,) = seen["spec"]["containers"]
        told = {
            "phase": "Running",
            "podIP": node.ipv4,
            "conditions": conditions,
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{seen['metadata']['name']}/status"
        self._api.ask("PATCH", path, {"status": told}, PATCH)

    def _beat(self, node: Node) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now}
        status = {"capacity": _ROOM, "allocatable": _ROOM, "conditions": [condition]}
        self._api.ask("PATCH", f"/api/v1/nodes/{node.name}/status", {"status": status}, PATCH)


def _lives(running: _Running) -> bool:
    return running.pod.process.process.poll() is None
