"""launcher.store.token_handover: how a head's secret reaches its nodes."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.launcher.cluster.head_address import reachable
from elaunch.launcher.cluster.home_key import token_at_home
from elaunch.launcher.cluster.schedulers.registry import detect
from elaunch.launcher.errors import SiteError
from elaunch.launcher.store import munge, token_handover
from elaunch.launcher.store.head import START_S
from elaunch.launcher.store.token_handover import AnotherJob, Meeting, Offer, fetch
from elaunch.rendezvous.endpoint import Endpoint
from tests.harness import DEADLINE_S, free_ports, joined

TOKEN = "0123456789abcdef0123456789abcdef"
# Stand-ins for munge and unmunge with their real output, and a cipher that hides nothing. $MAKER is the user of the
# credential.
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
    monkeypatch.setattr(token_handover, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(token_handover, "_OFFERED_S", 0.5)
    (tmp_path / "bin").mkdir()
    return Meeting(Endpoint("127.0.0.1", two_free_ports()), "test-7.0.0 train 20000", may_be_etcd=True)


def two_free_ports() -> int:
    """The first of two free ports that follow each other."""
    while True:
        port = free_ports(1)[0]
        with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
            return port


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
    # Error 17: another process on this host has read the same credential.
    monkeypatch.setenv("CODE", code)

    assert fetch(meeting, DEADLINE_S, said) == TOKEN


def test_another_users_credential_is_refused(
    tmp_path: Path, meeting: Meeting, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_munge(tmp_path)
    monkeypatch.setenv("MAKER", "4711")

    with pytest.raises(SiteError, match="the credential belongs to another user"):
        fetch(meeting, 0, said)


def test_without_munge_both_make_it_with_the_key_of_a_shared_home(tmp_path: Path, meeting: Meeting) -> None:
    without_munge(tmp_path)
    token = token_at_home(meeting.name, make=True)
    offer = Offer(meeting, token)

    assert fetch(meeting, DEADLINE_S, said) == token
    offer.close()

    assert [path.name for path in (tmp_path / ".elaunch").iterdir()] == ["key"]
    assert (tmp_path / ".elaunch" / "key").stat().st_mode & 0o777 == 0o600
    assert token_at_home("test-8.0.0 train 20000") not in ("", token)


def test_a_key_of_another_home_is_not_taken_for_the_heads(tmp_path: Path, meeting: Meeting, offer: Offer) -> None:
    with_munge(tmp_path)
    assert token_at_home(meeting.name, make=True) != TOKEN

    assert fetch(meeting, DEADLINE_S, said) == TOKEN


def test_a_key_that_others_can_read_is_none_and_neither_is_one_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meeting: Meeting
) -> None:
    assert token_at_home(meeting.name, make=True)

    (tmp_path / ".elaunch" / "key").chmod(0o640)
    assert token_at_home(meeting.name, make=True) == ""
    monkeypatch.setenv("HOME", "/proc")
    assert token_at_home(meeting.name, make=True) == ""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert token_at_home(meeting.name, make=True) == ""


@pytest.mark.parametrize("is_told", ["by the head", "in the seal"])
def test_the_head_of_another_job_is_not_waited_for(
    tmp_path: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch, is_told: str
) -> None:
    with_munge(tmp_path)
    other = replace(meeting, name="test-1.1.0 train 20000")
    # The name is in the seal: an attacker passes on a message of another job's head.
    monkeypatch.setattr(token_handover, "seal", lambda _: munge.seal(json.dumps([other.name, TOKEN])))
    offer = Offer(other if is_told == "by the head" else meeting, TOKEN)

    with pytest.raises(AnotherJob, match=r"'test-1.1.0 train 20000'.*--rdzv-endpoint 127.0.0.1:PORT"):
        fetch(meeting, 60, said)
    offer.close()


def test_a_node_waits_for_the_offer_as_long_as_the_heads_store_may_take_to_start() -> None:
    """Else the other nodes of a job end on a busy machine, while the head starts its store."""
    assert token_handover._OFFERED_S > START_S


def test_a_store_whose_head_offers_nothing_is_not_waited_for(meeting: Meeting) -> None:
    begun_s = time.monotonic()
    with (
        socket.create_server((meeting.endpoint.host, meeting.endpoint.port)),
        pytest.raises(SiteError, match="Connection refused"),
    ):
        fetch(replace(meeting, may_be_etcd=False), 600, said)

    assert time.monotonic() - begun_s < 300


def test_an_offer_goes_on_after_a_moment_without_descriptors(meeting: Meeting) -> None:
    offer = Offer(meeting, token_at_home(meeting.name, make=True))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    answers: list[bytes] = []
    with socket.socket() as first, socket.socket() as second:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            # The first connection may still be served: a thread that waits in accept() already has its descriptor.
            for asking in (first, second):
                asking.settimeout(0.3)
                asking.connect((meeting.port.host, meeting.port.port))
                with suppress(TimeoutError):
                    answers.append(asking.recv(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert len(answers) < 2
    assert fetch(meeting, DEADLINE_S, said)
    offer.close()


@contextmanager
def impostor(meeting: Meeting, speak: Callable[[socket.socket], None]) -> Iterator[None]:
    """A stranger's listener at the port of the head's token hand-over, beside a store that listens."""
    place = meeting.port
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            with suppress(OSError):
                asking, _ = listener.accept()
                with asking:
                    speak(asking)

    with (
        socket.create_server((meeting.endpoint.host, meeting.endpoint.port)),
        socket.create_server((place.host, place.port)) as listener,
    ):
        listener.settimeout(0.1)
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield
        finally:
            over.set()
            joined(serving)


@pytest.mark.parametrize("before", [b"", b'["test-7.0.0 train 20000", "print"]\n'], ids=["first word", "credential"])
def test_who_drips_words_holds_a_node_no_longer_than_one_exchange_may_take(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(token_handover, "_EXCHANGE_S", 0.5)

    def drip(asking: socket.socket) -> None:
        asking.sendall(before)
        end_s = time.monotonic() + 300
        asking.settimeout(0.05)
        while time.monotonic() < end_s:
            asking.sendall(b"x")
            # Stop when the node has closed the connection.
            with suppress(TimeoutError):
                if not asking.recv(1):
                    return

    begun_s = time.monotonic()
    with (
        impostor(meeting, drip),
        pytest.raises(SiteError, match=r"the program that listens there gave no whole answer within 0\.5 s"),
    ):
        fetch(replace(meeting, may_be_etcd=False), 600, said)

    assert time.monotonic() - begun_s < DEADLINE_S


@pytest.mark.parametrize(
    "words",
    [
        *(b"[" * 60_000 + b"\n", b"x" * 200_000, b"[" + b"9" * 5000 + b", 1]\n", b"\xff\xfe\n", b"\n", b""),
        *(b"[1, 2]\n", b'[["a"], {}]\n', b"NaN\n", b'"ab"\n', b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    ],
)
def test_words_that_no_head_says_are_a_sentence(meeting: Meeting, words: bytes) -> None:
    def speak(asking: socket.socket) -> None:
        asking.sendall(words)
        asking.shutdown(socket.SHUT_WR)
        asking.settimeout(DEADLINE_S)
        asking.recv(1)

    with impostor(meeting, speak), pytest.raises(SiteError) as caught:
        fetch(replace(meeting, may_be_etcd=False), 600, said)

    # If unread data resets the connection, the message says that instead.
    assert "the program that listens there is no head of a job" in str(caught.value) or "reset" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_fingerprint_and_a_credential_of_any_text_are_no_fault(tmp_path: Path, meeting: Meeting) -> None:
    with_munge(tmp_path)
    assert token_at_home(meeting.name, make=True)

    def speak(asking: socket.socket) -> None:
        asking.sendall(json.dumps([meeting.name, "é \ud800"]).encode() + b"\n:" + b"[" * 60_000)

    with impostor(meeting, speak), pytest.raises(SiteError, match="no head of a job"):
        fetch(replace(meeting, may_be_etcd=False), 600, said)


def test_a_long_name_of_another_job_is_cut(meeting: Meeting) -> None:
    def speak(asking: socket.socket) -> None:
        asking.sendall(json.dumps(["x" * 50_000, ""]).encode() + b"\n")

    with impostor(meeting, speak), pytest.raises(AnotherJob) as caught:
        fetch(replace(meeting, may_be_etcd=False), 600, said)

    assert len(str(caught.value)) < 400


def test_who_connects_and_reads_nothing_keeps_a_head_from_no_node(tmp_path: Path, meeting: Meeting) -> None:
    without_munge(tmp_path)
    offer = Offer(meeting, token_at_home(meeting.name, make=True))
    with ExitStack() as stack:
        for _ in range(200):
            stranger = stack.enter_context(socket.socket())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stranger.connect((meeting.port.host, meeting.port.port))
            stranger.sendall(b"x")
        begun_s = time.monotonic()

        assert fetch(meeting, 300, said) == token_at_home(meeting.name)

    assert time.monotonic() - begun_s < DEADLINE_S
    offer.close()


def test_where_nothing_works_there_is_a_line_to_type(tmp_path: Path, meeting: Meeting, offer: Offer) -> None:
    without_munge(tmp_path)

    with pytest.raises(SiteError) as caught:
        fetch(meeting, 60, said)

    assert (
        "no key in ~/.elaunch on this node is the head's key, and munge does not work: 127.0.0.1 sent no credential"
        in str(caught.value)
    )
    assert str(caught.value).endswith("before srun: export ELAUNCH_TOKEN=$(openssl rand -hex 16)")


def test_an_etcd_at_the_endpoint_needs_no_secret(meeting: Meeting) -> None:
    with socket.create_server((meeting.endpoint.host, meeting.endpoint.port)) as etcd:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    asking, _ = etcd.accept()
                    with asking:
                        asking.recv(1000)
                        asking.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert fetch(meeting, DEADLINE_S, said) == ""
        # The endpoint comes from the scheduler, and the listener there belongs to somebody else.
        with pytest.raises(SiteError, match="Connection refused"):
            fetch(replace(meeting, may_be_etcd=False), 5, said)
        etcd.shutdown(socket.SHUT_RDWR)
        joined(answering)


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

    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"}
    cluster = detect("slurm", {**slurm, "SLURM_STEP_NODELIST": head}, "here", lambda _: "")

    assert cluster
    assert reachable(cluster).head == found


@pytest.mark.parametrize(
    ("script", "head"),
    [("""echo '{"execution": {"nodelist": ["node[3-4]"]}}'""", "node3"), ("exit 1", None), (None, None)],
)
def test_the_head_of_a_job_of_flux_is_asked_of_flux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, head: str | None
) -> None:
    if script:
        (tmp_path / "flux").write_text(f"#!/bin/sh\n[ \"$*\" = 'job info f1 R' ] && {script}\n")
        (tmp_path / "flux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    task = {"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"}

    cluster = detect("flux", task, "here", lambda _: "")
    assert cluster
    assert reachable(cluster).head == head
