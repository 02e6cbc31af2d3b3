"""launcher.store.keyring: the tokens that one user's agents keep for each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.launcher.options.secret_file import private_folder, read_own, read_secret
from elaunch.launcher.store import keyring
from elaunch.launcher.store.keyring import KeptToken, KeptTokens
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.secret import Secret, fingerprint
from tests.harness import RUN_LIMIT_S, environment, free_ports, wait_for

TOKEN = "0123456789abcdef0123456789abcdef"
DER = Secret(TOKEN).der
PLACE = Endpoint("host0", 2379)
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

KEEP = """
import os, signal, sys
from elaunch.launcher.store.keyring import KeptToken
from elaunch.rendezvous.endpoint import Endpoint
kept = KeptToken(sys.argv[1], Endpoint("host0", 2379))
print(kept.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
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


def test_stores_have_files_of_their_own(home: Path) -> None:
    kept = [KeptToken(TOKEN, PLACE), KeptToken("another token than that", PLACE)]

    assert KeptTokens().token_for(Secret("another token than that").der) == "another token than that"
    kept[1].remove()
    assert KeptTokens().token_for(DER) == TOKEN
    kept[0].remove()
    assert list(home.iterdir()) == []


def as_others_could_read_it(path: Path) -> None:
    path.chmod(0o640)


def as_others_could_look_into_the_folder(path: Path) -> None:
    path.parent.chmod(0o755)


def as_a_link(path: Path) -> None:
    path.rename(path.parent / "real")
    path.symlink_to("real")


def as_a_folder_that_is_a_link(path: Path) -> None:
    path.parent.rename(path.parent.parent / "real")
    path.parent.symlink_to("real")


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def as_another_users(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def as_another_users_folder(path: Path) -> None:
    os.chown(path.parent, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "spoilt",
    [
        as_others_could_read_it,
        as_others_could_look_into_the_folder,
        as_a_link,
        as_a_folder_that_is_a_link,
        as_a_pipe,
        pytest.param(as_another_users, marks=needs_root),
        pytest.param(as_another_users_folder, marks=needs_root),
    ],
)
def test_what_others_could_have_put_there_is_not_believed(spoilt: Callable[[Path], None]) -> None:
    kept = KeptToken(TOKEN, PLACE)

    spoilt(Path(kept.path))

    assert KeptTokens().token_for(DER) == KeptTokens().place_of(PLACE) == ""
    kept.remove()


def test_what_a_killed_agent_left_goes_with_the_next_token_and_a_living_ones_stays() -> None:
    lives = KeptToken(TOKEN, PLACE)
    command = [sys.executable, "-c", KEEP, "the token of a dead agent"]
    left = Path(
        subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=RUN_LIMIT_S).stdout.strip()
    )
    assert left.exists()

    after = KeptToken("the token of the next agent", PLACE)

    assert not left.exists()
    assert Path(lives.path).exists()
    for kept in (lives, after):
        kept.remove()


def left_by(host: str, boot: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an agent that died with its host."""
    with monkeypatch.context() as there:
        be(host, boot, there)
        kept = KeptToken("the token of a dead agent", PLACE)
    os.close(kept._fd)
    return Path(kept.path)


def be(host: str, boot: str, monkeypatch: pytest.MonkeyPatch, network: str = "net:[1]") -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(keyring, "_boot", lambda: boot)
    monkeypatch.setattr(keyring, "_network", lambda: network)


@pytest.mark.parametrize(
    ("host", "boot", "is_removed"),
    [
        pytest.param("host-a", "boot-1", True, id="this host"),
        pytest.param("pod-1", "boot-1", True, id="a container of this host"),
        pytest.param("host-a", "boot-0", True, id="this host before a reboot"),
        pytest.param("host-b", "boot-0", False, id="another host"),
    ],
)
def test_what_a_host_left_goes_with_the_next_token_there_and_what_another_left_is_not_touched(
    host: str, boot: str, is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by(host, boot, monkeypatch)
    be("host-a", "boot-1", monkeypatch)

    KeptToken(TOKEN, PLACE).remove()

    assert left.exists() is not is_removed


@pytest.mark.parametrize("host", ["localhost", "localhost.localdomain"])
def test_hosts_that_all_are_called_localhost_are_not_one_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_by(host, "boot-0", monkeypatch)
    be(host, "boot-1", monkeypatch)

    KeptToken(TOKEN, PLACE).remove()

    assert left.exists()


def test_what_lives_stays_also_where_its_host_seems_to_have_been_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    be("host-a", "boot-0", monkeypatch)
    lives = KeptToken("the token of a living agent", PLACE)
    be("host-a", "boot-1", monkeypatch)

    KeptToken(TOKEN, PLACE).remove()

    assert Path(lives.path).exists()
    lives.remove()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_store_at_a_loopback_address_is_at_that_of_its_own_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Endpoint(host, 29400)
    be("host-a", "boot-1", monkeypatch)
    kept = KeptToken(TOKEN, place)
    found = [KeptTokens().place_of(place)]
    for boot, network in (("boot-2", "net:[1]"), ("boot-1", "net:[2]")):
        be("host-a", boot, monkeypatch, network)
        found.append(KeptTokens().place_of(place))

    assert found == [f"~/.elaunch/stores/{fingerprint(DER)}", "", ""]
    kept.remove()


def test_a_store_at_an_address_that_all_hosts_know_is_found_from_each(monkeypatch: pytest.MonkeyPatch) -> None:
    be("host-a", "boot-1", monkeypatch)
    kept = KeptToken(TOKEN, PLACE)
    be("host-b", "boot-2", monkeypatch, "net:[2]")

    assert KeptTokens().place_of(PLACE)
    kept.remove()


def test_without_a_home_nothing_is_kept_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/proc", "/nowhere"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(OSError, match=r"No such file|not permitted|denied|Read-only"):
            KeptToken(TOKEN, PLACE)
        assert KeptTokens().token_for(DER) == ""


def test_a_folder_that_is_swapped_meanwhile_is_not_the_one_that_is_read(home: Path) -> None:
    kept = KeptToken(TOKEN, PLACE)
    with private_folder("~/.elaunch/stores") as folder:
        (home / ".elaunch" / "stores").rename(home / "away")
        (home / ".elaunch" / "stores").mkdir(0o700)

        assert read_own(fingerprint(DER), 99, folder).decode().startswith(TOKEN)
    kept.remove()


def test_the_stores_process_removes_it_when_its_agent_is_killed(home: Path) -> None:
    code = """
import os, sys, time
from elaunch.launcher.store.head import listen, serve
from elaunch.launcher.store.rendezvous_plan import Serving
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
