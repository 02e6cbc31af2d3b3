"""rendezvous.secret: what a token stands for. server/test_server.py has the handshakes, and the refusals."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from elaunch.rendezvous.secret import TOKEN_CHARACTERS_MIN, Secret
from tests.descriptors import opened

TOKEN = "0123456789abcdef"


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
