"""rendezvous.secret: a peer with the token is accepted, both ways, and no other."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from pathlib import Path

import pytest

from elaunch.rendezvous.secret import TOKEN_CHARACTERS_MIN, Secret
from tests.descriptors import opened
from tests.harness import joined

TOKEN = "0123456789abcdef"
OTHER = "0123456789abcdeg"


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> list[object]:
    """A TLS handshake over a socket pair and a message from each side; the messages, or the error."""
    ours, theirs = socket.socketpair()
    received: list[object] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as channel:
                channel.sendall(b"from the server")
                received.append(channel.recv(100))
        except (ssl.SSLError, OSError) as error:
            received.append(error)

    ours.settimeout(30)
    theirs.settimeout(30)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours) as channel:
            message = channel.recv(100)
            channel.sendall(b"from the client")
    except (ssl.SSLError, OSError) as error:
        ours.close()
        joined(thread)
        return [error]
    joined(thread)
    return [message, *received]


def test_both_sides_of_one_token_understand_each_other() -> None:
    messages = shake_hands(Secret(TOKEN).server_context(), Secret(TOKEN).client_context())

    assert messages == [b"from the server", b"from the client"]


def test_a_server_with_another_token_is_refused() -> None:
    (error,) = shake_hands(Secret(OTHER).server_context(), Secret(TOKEN).client_context())

    assert isinstance(error, ssl.SSLCertVerificationError)


def test_what_a_token_stands_for_never_changes() -> None:
    """Agents of two releases may meet: a change here is a change of protocol."""
    assert Secret(TOKEN).bearer == "fdc174d75d144c8fdce921e222e421b0ed723afe43f0f5b0b93b5dee2feaf5dc"
    digest = hashlib.sha256(Secret(TOKEN).certificate.encode()).hexdigest()
    assert digest == "cc330874bfc9a1b3416eec77049a6668de016309846705f94ec2734f256640b3"


def test_a_short_token_is_refused_with_a_sentence_that_does_not_show_it() -> None:
    short = "hunter2"

    with pytest.raises(ValueError, match=f"has 7 characters, and it takes at least {TOKEN_CHARACTERS_MIN}") as refusal:
        Secret(short)

    assert short not in str(refusal.value)


def test_nothing_stays_on_disk_or_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = opened()

    secret = Secret(TOKEN)
    secret.server_context()
    secret.client_context()

    assert list(tmp_path.iterdir()) == []
    assert not opened() - before
