"""What modules keep of the folder in which they were imported, and the move of that to the folder of a job.

A fork server that stays imports in a folder that nothing else names, so a text that begins with its path comes from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from types import ModuleType
from typing import Any


def keepers(modules: Mapping[str, ModuleType], folder: str) -> list[str]:
    """The modules that keep a path in `folder`."""
    return sorted(name for name, module in modules.items() if names_of_folder(module, folder))


def names_of_folder(module: ModuleType, folder: str) -> list[str]:
    """The names in `module` for paths in `folder`."""
    return [name for name, value in vars(module).items() if _is_below(value, folder)]


def move(module: ModuleType, old: str, new: str) -> None:
    """Give these names the same paths in the folder `new`."""
    values: dict[str, Any] = vars(module)
    for name in names_of_folder(module, old):
        path = new + str(values[name])[len(old) :]
        values[name] = path if isinstance(values[name], str) else type(values[name])(path)


def _is_below(value: object, folder: str) -> bool:
    return isinstance(value, str | PurePath) and f"{value}{os.sep}".startswith(f"{folder}{os.sep}")
