"""What a module keeps of the folder in which it was imported becomes a path in the folder of the job."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from elaunch.agent.forkserver.warm.folder import move, names_of_folder


def test_paths_in_the_folder_are_moved_and_nothing_else() -> None:
    module = ModuleType("heavy")
    module.__dict__.update(CWD="/a/b", LOGS="/a/b/logs", OTHER="/a/bc", PATH=Path("/a/b/x"), ROOT="/", COUNT=1)

    names = names_of_folder(module, "/a/b")
    move(module, "/a/b", "/home/me")

    values = vars(module)
    assert names == ["CWD", "LOGS", "PATH"]
    assert [values[name] for name in names] == ["/home/me", "/home/me/logs", Path("/home/me/x")]
    assert (values["OTHER"], values["ROOT"], values["COUNT"]) == ("/a/bc", "/", 1)
