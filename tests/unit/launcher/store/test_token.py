"""launcher.store.token: the tokens that one user's agents keep for each other, and how a head's reaches its nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.launcher.errors import SiteError
from elaunch.launcher.options.files import read_secret
from elaunch.launcher.store import token as tokens
from elaunch.launcher.store.serve import START_S, listen
from elaunch.launcher.store.token import AnotherJob, KeptToken, KeptTokens, Meeting, Offer, fetch, token_at_home
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.secret import Secret, fingerprint
from tests.harness import DEADLINE_S, environment, free_ports, joined, wait_for

TOKEN = "0123456789abcdef0123456789abcdef"
DER = Secret(TOKEN).der
PLACE = Endpoint("host0", 2379)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
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
    monkeypatch.setattr(tokens, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(tokens, "_OFFERED_S", 0.5)
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
    made = offered(meeting, TOKEN)
    yield made
    made.close()


def offered(meeting: Meeting, token: str) -> Offer:
    bound = listen(meeting.port)
    assert bound
    return Offer(meeting, token, bound.listener)


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
    offer = offered(meeting, token)

    assert fetch(meeting, DEADLINE_S, said) == token
    offer.close()

    assert [path.name for path in (tmp_path / ".elaunch").iterdir()] == ["key"]
    assert (tmp_path / ".elaunch" / "key").stat().st_mode & 0o777 == 0o600
    assert token_at_home("test-8.0.0 train 20000") not in ("", token)


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
    seal = tokens.seal
    monkeypatch.setattr(tokens, "seal", lambda _: seal(json.dumps([other.name, TOKEN])))
    offer = offered(other if is_told == "by the head" else meeting, TOKEN)

    with pytest.raises(AnotherJob, match=r"'test-1.1.0 train 20000'.*--rdzv-endpoint 127.0.0.1:PORT"):
        fetch(meeting, 60, said)
    offer.close()


def test_a_node_waits_for_the_offer_as_long_as_the_heads_store_may_take_to_start() -> None:
    """Else the other nodes of a job end on a busy machine, while the head starts its store."""
    assert tokens._OFFERED_S > START_S


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


def test_who_drips_words_holds_a_node_no_longer_than_one_exchange_may_take(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_EXCHANGE_S", 0.5)

    def drip(asking: socket.socket) -> None:
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
        *(b"[" * 60_000 + b"\n", b"x" * 200_000, b"\xff\xfe\n", b"", b"[1, 2]\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
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


def test_who_connects_and_reads_nothing_keeps_a_head_from_no_node(tmp_path: Path, meeting: Meeting) -> None:
    without_munge(tmp_path)
    offer = offered(meeting, token_at_home(meeting.name, make=True))
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


# --- files


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_kept_token_is_found_by_the_stores_certificate_and_nothing_is_left_of_it(home: Path) -> None:
    before = os.umask(0)
    kept = KeptToken(TOKEN, PLACE)
    os.umask(before)

    assert Path(kept.path).stat().st_mode & 0o777 == 0o600
    assert Path(kept.path).parent.stat().st_mode & 0o777 == 0o700
    assert KeptTokens().token_for(DER) == TOKEN
    assert KeptTokens().place_of(PLACE) == f"~/.elaunch/stores/{fingerprint(DER)}"
    # The option in the line for a node without this home: --token-file with a copy of the file.
    assert read_secret(kept.path) == TOKEN

    kept.remove()
    assert KeptTokens().token_for(DER) == KeptTokens().place_of(PLACE) == ""
    assert list(home.iterdir()) == []


def as_others_could_read_it(path: Path) -> None:
    path.chmod(0o640)


def as_others_could_look_into_the_folder(path: Path) -> None:
    path.parent.chmod(0o755)


def as_a_link(path: Path) -> None:
    path.rename(path.parent / "real")
    path.symlink_to("real")


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def as_another_users(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "spoilt",
    [
        as_others_could_read_it,
        as_others_could_look_into_the_folder,
        as_a_link,
        as_a_pipe,
        pytest.param(as_another_users, marks=needs_root),
    ],
)
@pytest.mark.usefixtures("home")
def test_what_others_could_have_put_there_is_not_believed(spoilt: Callable[[Path], None]) -> None:
    kept = KeptToken(TOKEN, PLACE)

    spoilt(Path(kept.path))

    assert KeptTokens().token_for(DER) == KeptTokens().place_of(PLACE) == ""
    kept.remove()


@pytest.mark.usefixtures("home")
def test_without_a_home_nothing_is_kept_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/proc", "/nowhere"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(OSError, match=r"No such file|not permitted|denied|Read-only"):
            KeptToken(TOKEN, PLACE)
        assert KeptTokens().token_for(DER) == ""


def test_the_stores_process_removes_it_when_its_agent_is_killed(home: Path) -> None:
    code = """
import os, sys, time
from elaunch.launcher.store.serve import listen, serve
from elaunch.launcher.store.locate import Serving
from elaunch.rendezvous.endpoint import Endpoint
place = Endpoint("127.0.0.1", int(sys.argv[1]))
process = serve(listen(place), Serving.MEMORY, place, "")
print(process.kept, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(free_ports(1)[0])], env=environment(), stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout
        path = Path(agent.stdout.readline().strip())
        assert path.exists()

        agent.kill()

        wait_for(lambda: not list(home.iterdir()), "nothing is left")
