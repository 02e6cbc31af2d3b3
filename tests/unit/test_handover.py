"""launcher.cluster: how a head's secret reaches its nodes, and how the tasks beside an agent wait for its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.launcher.cluster import handover
from elaunch.launcher.cluster.companion import open_for_others
from elaunch.launcher.cluster.facts import Cluster
from elaunch.launcher.cluster.handover import Meeting, Offer, fetch
from elaunch.launcher.cluster.place import reachable
from elaunch.launcher.errors import SiteError
from elaunch.rendezvous.plan import Endpoint
from tests.etcd import free_ports
from tests.harness import environment, wait_for

TOKEN = "0123456789abcdef0123456789abcdef"
# As munge and unmunge were seen to speak, with a cipher that keeps nothing secret; $MAKER is whose credential it is.
MUNGE = '#!/bin/sh\nprintf MUNGE:; cat; printf ":$2"\n'
UNMUNGE = """#!/bin/sh
read -r text
printf 'STATUS: Success (0)\\nUID:    somebody (%s)\\n\\n' "${MAKER:-$(id -u)}"
echo "$text" | cut -d: -f2 | tr -d '\\n'
exit ${CODE:-0}
"""


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.5)
    (tmp_path / "bin").mkdir()
    return Meeting(Endpoint("127.0.0.1", free_ports(1)[0]), "test-7.0.0")


def with_munge(folder: Path, munge: str = MUNGE, unmunge: str = UNMUNGE) -> None:
    for name, text in (("munge", munge), ("unmunge", unmunge)):
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)


def without_munge(folder: Path) -> None:
    with_munge(folder, "#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 1\n")


@pytest.fixture
def offer(meeting: Meeting) -> Iterator[Offer]:
    made = Offer(meeting, TOKEN)
    yield made
    made.close()


def said(line: str) -> None:
    print(line)


@pytest.mark.parametrize("code", ["0", "17"])
def test_the_secret_comes_by_munge_to_its_own_user(
    tmp_path: Path, meeting: Meeting, offer: Offer, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    with_munge(tmp_path)
    meeting.file.unlink()
    # 17: somebody on this host has read the same credential.
    monkeypatch.setenv("CODE", code)

    assert fetch(meeting, 5, said) == TOKEN


def test_another_users_credential_is_refused(
    tmp_path: Path, meeting: Meeting, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_munge(tmp_path)
    meeting.file.unlink()
    monkeypatch.setenv("MAKER", "4711")

    with pytest.raises(SiteError, match="the credential is another user's"):
        fetch(meeting, 0, said)


def test_without_munge_it_comes_through_the_home_and_nothing_stays_there(tmp_path: Path, meeting: Meeting) -> None:
    without_munge(tmp_path)
    offer = Offer(meeting, TOKEN)

    token = fetch(meeting, 5, said)

    assert token == TOKEN
    assert meeting.file.stat().st_mode & 0o777 == 0o600
    offer.close()
    assert not list(meeting.file.parent.iterdir())


def test_a_file_that_others_can_write_is_not_believed(tmp_path: Path, meeting: Meeting) -> None:
    without_munge(tmp_path)
    meeting.file.parent.mkdir()
    meeting.file.write_text(TOKEN)
    meeting.file.chmod(0o666)

    with pytest.raises(SiteError, match=r"did not come"):
        fetch(meeting, 0, said)


def test_where_nothing_works_there_is_a_line_to_type(tmp_path: Path, meeting: Meeting, offer: Offer) -> None:
    without_munge(tmp_path)
    meeting.file.unlink()

    with pytest.raises(SiteError) as caught:
        fetch(meeting, 60, said)

    assert "munge does not work: 127.0.0.1 has none" in str(caught.value)
    assert str(caught.value).endswith("before srun: export ELAUNCH_TOKEN=$(openssl rand -hex 16)")


def test_an_etcd_at_the_endpoint_needs_no_secret(meeting: Meeting) -> None:
    with socket.create_server((meeting.endpoint.host, meeting.endpoint.port)) as etcd:

        def answer() -> None:
            asking, _ = etcd.accept()
            with asking:
                asking.recv(1000)
                asking.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        threading.Thread(target=answer).start()
        assert fetch(meeting, 5, said) == ""


@pytest.mark.parametrize(
    ("head", "said", "found"),
    [
        ("localhost", "NodeAddr=10.0.0.9", "localhost"),
        ("n1.invalid", "NodeName=n1.invalid NodeAddr=127.0.0.5 NodeHostName=x", "127.0.0.5"),
        ("n1.invalid", "Node n1 not found", "n1.invalid"),
    ],
)
def test_a_head_whose_name_is_no_hosts_has_the_address_that_slurm_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, said: str, found: str
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho {said}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert reachable(Cluster("Slurm", head=head)).head == found


# --- tasks beside the agent

WAIT = """
import sys
from elaunch.launcher.cluster.companion import wait_for_agent
from elaunch.launcher.cluster.facts import Cluster
print("begins", flush=True)
sys.exit(wait_for_agent(Cluster("Slurm", node_index=0, run_id=sys.argv[1], task=1, tasks=2), print, float(sys.argv[2])))
"""


def companion(run_id: str, appear_s: float = 30) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAIT, run_id, str(appear_s)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def test_a_task_beside_the_agent_stays_until_that_has_ended_whatever_signal_comes() -> None:
    run_id = f"test-{os.getpid()}"
    waiting = companion(run_id)
    assert waiting.stdout
    waiting.stdout.readline()
    listener = open_for_others(Cluster("Slurm", node_index=0, run_id=run_id, tasks=2))
    assert listener
    wait_for(lambda: f"@elaunch-agent-{os.geteuid()}-{run_id}-0" in connected(), "the task is connected")

    waiting.terminate()
    waiting.send_signal(10)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.3)
    listener.close()

    assert waiting.wait(10) == 0
    waiting.stdout.close()


def connected() -> list[str]:
    """The names of unix sockets with somebody connected, or waiting to be accepted (state 3 or 2)."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [words[7] for words in lines if len(words) > 7 and words[5] in ("02", "03")]


def test_a_task_that_meets_no_agent_says_so_and_ends() -> None:
    waiting = companion(f"none-{os.getpid()}", 0.3)

    output, _ = waiting.communicate(timeout=10)

    assert waiting.returncode == 0
    assert "task 1 of this node has met no agent here within 0.3 s" in output
