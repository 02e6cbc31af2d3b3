"""Progress for Kubeflow Trainer's status server: a real server with TLS takes what a real job posts."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.serve.kubeflow import ProgressPoster
from tests.certificates import Certificates
from tests.harness import free_ports, joined, script, wait_for, with_limits

pytestmark = pytest.mark.usefixtures("without_torch")

PLACE = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/night/status"
# Waits in the middle until the test has seen a post.
TRAINS = """
import time
from pathlib import Path
from elaunch.trainer import link

for step in range(1, 201):
    link.report(step, 200)
    time.sleep(0.02)
    while step == 50 and not Path("go").exists():
        time.sleep(0.01)
"""
OFTEN = with_limits({"elaunch.agent.workers.group.EVERY_S": 0.5})


@dataclass
class StatusServer:
    """The controller's server. `posts` are the paths, headers and bodies of what it got; it answers with `code`."""

    folder: Path
    posts: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    code: int = 200

    def __post_init__(self) -> None:
        certificates = Certificates(self.folder / "server")
        self.ca = certificates.ca
        taken = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                taken.posts.append((self.path, dict(self.headers), body))
                self.send_response(taken.code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.server, certificates.server_key)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)

    def variables(self, token: str) -> dict[str, str]:
        """The variables of a pod whose token is in the file of that name."""
        path = self.folder / token
        path.write_text(f"{token}\n")
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self.http.server_port}{PLACE}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.ca),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(path),
        }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    server = StatusServer(tmp_path)
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    joined(thread)


def test_one_node_alone_posts_progress_and_remaining_time_with_the_newest_token(
    server: StatusServer, tmp_path: Path
) -> None:
    script(tmp_path, TRAINS)
    (port,) = free_ports(1)
    job = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--no-preload", "train.py")
    env = {"ELAUNCH_TOKEN": "0123456789abcdef"}

    with (
        OFTEN(tmp_path, *job, env={**env, **server.variables("one")}) as first,
        OFTEN(tmp_path, *job, env={**env, **server.variables("other")}) as second,
    ):
        wait_for(lambda: server.posts, "a post")
        poster = server.posts[0][1]["Authorization"].removeprefix("Bearer ")
        (tmp_path / poster).write_text("rotated")
        (tmp_path / "go").touch()
        codes = [first.wait(), second.wait()]

    assert codes == [0, 0], first.output + second.output
    assert {path for path, _, _ in server.posts} == {PLACE}
    tokens = [headers["Authorization"] for _, headers, _ in server.posts]
    assert tokens == [f"Bearer {poster}", *["Bearer rotated"] * (len(tokens) - 1)]
    statuses = [body["trainerStatus"] for _, _, body in server.posts]
    shares = [status["progressPercentage"] for status in statuses]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= 25
    assert (shares[-1], statuses[-1]["estimatedRemainingSeconds"]) == (100, 0)
    assert any(status.get("estimatedRemainingSeconds", 0) > 0 for status in statuses[:-1])
    for status in statuses:
        assert set(status) - {"estimatedRemainingSeconds"} == {"progressPercentage", "lastUpdatedTime"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])


def test_only_the_node_of_rank_0_posts_and_nothing_without_a_total(server: StatusServer) -> None:
    poster = ProgressPoster(server.variables("a"), print)

    for first_rank, total in ((2, 9), (0, 0), (0, 9)):
        poster.observe("progress", {"first_rank": first_rank, "steps": [9], "total": total}, 0.0)
        poster.close()

    assert [headers["Authorization"] for _, headers, _ in server.posts] == ["Bearer a"]


@pytest.mark.parametrize("wrong", ["another authority", "a refusal", "no token"])
def test_a_server_that_cannot_be_used_costs_one_warning(wrong: str, server: StatusServer, tmp_path: Path) -> None:
    script(tmp_path, TRAINS)
    (tmp_path / "go").touch()
    env = server.variables("token")
    if wrong == "another authority":
        env["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(Certificates(tmp_path / "other").ca)
    elif wrong == "a refusal":
        server.code = 403
    else:
        (tmp_path / "token").unlink()

    with OFTEN(tmp_path, "--no-preload", "train.py", env=env) as job:
        code = job.wait()

    reasons = {
        "another authority": ".*certificate verify failed.*",
        "a refusal": "HTTP Error 403: .*",
        "no token": ".*token'",
    }
    url = re.escape(env["KUBEFLOW_TRAINER_SERVER_URL"])
    warning = rf"^elaunch: progress cannot be posted to {url} \({reasons[wrong]}\); the job continues$"
    assert code == 0, job.output
    assert len(re.findall(warning, job.stderr, re.MULTILINE)) == job.stderr.count("progress") == 1, job.stderr


def test_a_server_that_does_not_answer_delays_the_end_by_a_moment_only(server: StatusServer, tmp_path: Path) -> None:
    script(tmp_path, TRAINS)
    (tmp_path / "go").touch()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"https://127.0.0.1:{silent.getsockname()[1]}{PLACE}"
        env = {**server.variables("token"), "KUBEFLOW_TRAINER_SERVER_URL": place}
        # Longer than any test may take.
        forever = with_limits({"elaunch.agent.serve.kubeflow._POST_S": 1000.0})

        with forever(tmp_path, "--no-preload", "train.py", env=env) as job:
            code = job.wait()

    assert code == 0, job.output
