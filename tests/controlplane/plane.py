"""A real Kubernetes control plane on this machine's loopback: etcd, API server, controllers, scheduler; no kubelet."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.etcd import Etcd
from tests.harness import DEADLINE_S, RUN_LIMIT_S, free_ports, wait_for
from tests.manifests import Object, kubectl

BINARIES = Path(os.environ.get("ELAUNCH_CONTROL_PLANE", Path.home() / ".cache" / "elaunch-control-plane")) / "bin"
# A node is not ready after so long without a word; Kubernetes' own default is 40 s.
SILENCE_S = 8
PATCH = "application/strategic-merge-patch+json"


class Api:
    """The API server, asked in JSON. HTTPError is what it refuses."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        # The certificate was made a moment ago, on this machine.
        self._context = ssl._create_unverified_context()

    def ask(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Any:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": content},
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, context=self._context, timeout=10) as answer:
            return json.loads(answer.read())


class Plane:
    """Use it as a context manager; `kubectl` is a person's, `api` a kubelet's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._etcd = Etcd()
        token = secrets.token_hex(16)
        secure, manager, scheduler = free_ports(3)
        url = f"https://127.0.0.1:{secure}"
        self.api = Api(url, token)
        (folder / "tokens.csv").write_text(f"{token},admin,1,system:masters\n")
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(_kubeconfig(url, token)))
        try:
            self._make_key()
            self._start(
                "kube-apiserver",
                {
                    "etcd-servers": self._etcd.endpoints
                    if "://" in self._etcd.endpoints
                    else f"http://{self._etcd.endpoints}",
                    "bind-address": "127.0.0.1",
                    "advertise-address": "127.0.0.1",
                    "secure-port": secure,
                    "cert-dir": folder / "apiserver",
                    "token-auth-file": folder / "tokens.csv",
                    "authorization-mode": "RBAC",
                    "service-account-issuer": "https://elaunch.test",
                    "service-account-key-file": folder / "sa.pub",
                    "service-account-signing-key-file": folder / "sa.key",
                    "service-cluster-ip-range": "10.96.0.0/16",
                    "disable-admission-plugins": "ServiceAccount",
                },
            )
            wait_for(self._is_ready, "an API server")
            common = {"kubeconfig": self.kubeconfig, "bind-address": "127.0.0.1", "port": 0}
            self._start(
                "kube-controller-manager",
                {
                    **common,
                    "secure-port": manager,
                    "cert-dir": folder / "manager",
                    "service-account-private-key-file": folder / "sa.key",
                    "node-monitor-grace-period": f"{SILENCE_S}s",
                    "node-monitor-period": "1s",
                },
            )
            self._start("kube-scheduler", {**common, "secure-port": scheduler, "cert-dir": folder / "scheduler"})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(DEADLINE_S)
        self._etcd.close()

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """What kubectl prints, in a namespace of its own where nothing else is said."""
        done = subprocess.run(
            [kubectl(), "--kubeconfig", str(self.kubeconfig), *words],
            input=text,
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, "HOME": str(self._folder)},
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}\n{text}"
        return done.stdout

    def _start(self, program: str, options: Mapping[str, object]) -> None:
        words = [f"--{name}={value}" for name, value in options.items()]
        with (self._folder / f"{program}.log").open("wb") as log:
            command = ["setpriv", "--pdeathsig", "KILL", str(BINARIES / program), *words]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _is_ready(self) -> bool:
        assert self._processes[0].poll() is None, (self._folder / "kube-apiserver.log").read_text()[-3000:]
        try:
            self.api.ask("GET", "/api/v1/namespaces/default")
        except (OSError, ValueError):
            return False
        return True

    def _make_key(self) -> None:
        """For the tokens of service accounts, which nobody here uses."""
        key = self._folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=RUN_LIMIT_S)
        public = ["openssl", "rsa", "-in", key, "-pubout", "-out", self._folder / "sa.pub"]
        subprocess.run(public, check=True, capture_output=True, timeout=RUN_LIMIT_S)


def _kubeconfig(url: str, token: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin", "namespace": "team"}}],
        "current-context": "here",
    }
