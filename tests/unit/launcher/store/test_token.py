"""launcher.store.token: the tokens that one user's agents keep for each other, and the one that they derive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elaunch.launcher.preflight import read_secret
from elaunch.launcher.store.token import StoredTokens, derived_token, store_token
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.secret import Secret, fingerprint
from tests.harness import environment, free_ports, wait_for

TOKEN = "0123456789abcdef0123456789abcdef"
DER = Secret(TOKEN).der
PLACE = Endpoint("host0", 2379)
OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_nodes_that_share_a_home_derive_one_token_for_each_job(home: Path) -> None:
    token = derived_token("test-7.0.0 train 20000")

    assert derived_token("test-7.0.0 train 20000") == token
    assert derived_token("test-8.0.0 train 20000") not in ("", token)
    assert StoredTokens(token).token_for(Secret(token).der) == token
    assert StoredTokens(token).token_for(DER) == ""
    assert [path.name for path in (home / ".elaunch").iterdir()] == ["key"]
    assert (home / ".elaunch" / "key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_others_can_read_is_none_and_neither_is_one_without_a_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert derived_token("job")

    (home / ".elaunch" / "key").chmod(0o640)
    assert derived_token("job") == ""
    monkeypatch.setenv("HOME", "/proc")
    assert derived_token("job") == ""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert derived_token("job") == ""


def test_a_kept_token_is_found_by_the_stores_certificate() -> None:
    before = os.umask(0)
    kept = store_token(TOKEN, PLACE)
    os.umask(before)

    assert Path(kept).stat().st_mode & 0o777 == 0o600
    assert Path(kept).parent.stat().st_mode & 0o777 == 0o700
    assert StoredTokens().token_for(DER) == TOKEN
    assert StoredTokens().path_of(PLACE) == f"~/.elaunch/stores/{fingerprint(DER)}"
    # The option in the line for a node without this home: --token-file with a copy of the file.
    assert read_secret(kept) == TOKEN


@pytest.mark.parametrize(
    "spoilt", ["others could read it", "a link", "a pipe", pytest.param("another user's", marks=needs_root)]
)
def test_what_others_could_have_put_there_is_not_believed(spoilt: str) -> None:
    kept = Path(store_token(TOKEN, PLACE))

    match spoilt:
        case "others could read it":
            kept.chmod(0o640)
        case "a link":
            kept.rename(kept.parent / "real")
            kept.symlink_to("real")
        case "a pipe":
            kept.unlink()
            os.mkfifo(kept, 0o600)
        case _:
            os.chown(kept, OTHER_USER, OTHER_USER)

    assert StoredTokens().token_for(DER) == StoredTokens().path_of(PLACE) == ""


def test_without_a_home_nothing_is_kept_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/proc", "/nowhere"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(OSError, match=r"No such file|not permitted|denied|Read-only"):
            store_token(TOKEN, PLACE)
        assert StoredTokens().token_for(DER) == ""


def test_the_stores_process_removes_it_when_its_agent_is_killed() -> None:
    code = """
import os, sys, time
from elaunch.launcher.store.serve import listen, serve
from elaunch.rendezvous.endpoint import Endpoint
place = Endpoint("127.0.0.1", int(sys.argv[1]))
process = serve(listen(place), place, "")
print(process.process.pid, process.token_file, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(free_ports(1)[0])], env=environment(), stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout
        pid, name = agent.stdout.readline().split()
        server, path = psutil.Process(int(pid)), Path(name)
        assert path.exists()

        agent.kill()

        wait_for(lambda: not path.exists() and not server.is_running(), "nothing is left")
