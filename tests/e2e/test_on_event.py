"""--on-event in a real job: the script of the documentation, against a server that takes what it posts."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import REPOSITORY, joined, script, wait_for, with_limits

pytestmark = pytest.mark.usefixtures("without_torch")

FAILS_ONCE = """
import os, sys
sys.exit(3 if os.environ["ELAUNCH_GENERATION"] == "0" else 0)
"""
LIGHT = ("--no-preload", "--nproc-per-node", "2")
# A run of the command may take as long as a busy host needs for it.
SLOWLY = {f"elaunch.agent.serve.event_hook.{name}": 600.0 for name in ("RUN_S_MAX", "FLUSH_S")}


@pytest.fixture
def chat() -> Iterator[HTTPServer]:
    """A server that keeps what is posted to it in `posted`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.posted = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    joined(thread)


def test_the_script_of_the_page_posts_what_happened_and_the_job_does_not_wait_for_it(
    tmp_path: Path, chat: HTTPServer
) -> None:
    (notify,) = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "docs" / "observe.md").read_text(), re.DOTALL)
    (tmp_path / "notify.sh").write_text(notify)
    (tmp_path / "notify.sh").chmod(0o755)
    script(tmp_path, FAILS_ONCE)
    env = {"CHAT_WEBHOOK": f"http://127.0.0.1:{chat.server_port}/", "no_proxy": "127.0.0.1"}

    options = ("--on-event", "./notify.sh", "--run-id", "night", *LIGHT)
    with with_limits(SLOWLY)(tmp_path, *options, "train.py", env={"TMPDIR": str(tmp_path), **env}) as job:
        job.wait()

    assert job.code == 0, job.output
    texts = [posted["text"] for posted in chat.posted]  # type: ignore[attr-defined]
    assert [posted.keys() for posted in chat.posted] == [{"text"}] * 3  # type: ignore[attr-defined]
    assert re.fullmatch(r"job night: rank [01] .* exited with code 3 in generation 0", texts[0])
    assert texts[1:] == [
        "job night continues in generation 1: 2 workers (restart 1 of 3)",
        "job night succeeded, 1 of 3 restarts used",
    ]


def test_the_command_has_no_secret_and_outlives_its_generation(tmp_path: Path) -> None:
    script(tmp_path, "raise SystemExit(3)")
    facts = """
import os, time
from pathlib import Path
if Path("facts").exists():
    raise SystemExit
has = sorted({"ELAUNCH_TOKEN", "ELAUNCH_LINK", "RANK"} & set(os.environ))
Path("new").write_text(f"{os.getpid()} {has}")
Path("new").rename("facts")
time.sleep(600)
"""
    script(tmp_path, facts, "hook.py")
    hook = f"{sys.executable} -S hook.py"

    options = ("--on-event", hook, "--no-preload")
    with with_limits(SLOWLY)(tmp_path, *options, "train.py", env={"ELAUNCH_TOKEN": "0" * 16}) as job:
        wait_for((tmp_path / "facts").exists, "the command")
        pid, has = (tmp_path / "facts").read_text().split(" ", 1)
        job.wait_for_output("^train.py FAILED$")
        assert psutil.pid_exists(int(pid))
        psutil.Process(int(pid)).kill()

    assert has == "[]"
