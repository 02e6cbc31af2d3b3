"""Where fork servers stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.agent.forkserver.warm.place import folder


def test_it_is_the_users_runtime_folder_if_that_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_RUNTIME_DIR": os.fspath(tmp_path)}
    own = folder(environ)

    # As under sudo, which may keep the variable.
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    under_sudo = folder(environ)

    assert own == tmp_path / "elaunch_warm"
    assert under_sudo == Path("/tmp", f"elaunch_warm_{tmp_path.stat().st_uid + 1}")


@pytest.mark.parametrize("value", ["", "relative", "/no/such/folder", "/proc/version"])
def test_without_a_runtime_folder_it_is_in_tmp(value: str) -> None:
    assert folder({"XDG_RUNTIME_DIR": value}) == Path("/tmp", f"elaunch_warm_{os.geteuid()}")
