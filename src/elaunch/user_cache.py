"""Folders of elaunch's in the user's cache folder: where they are, and that nobody else has made them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str], name: str) -> Path | None:
    """The folder of that name, which need not exist. None for a user without a home."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # noqa: PTH117
        home = environ.get("HOME", "")
        if not os.path.isabs(home):  # noqa: PTH117
            return None
        cache = f"{home}/.cache"
    return Path(cache, "elaunch", name)


def make(folder: Path) -> bool:
    """Make `folder`, its parent and the cache folder above. Returns whether only this user can have made the two."""
    cache, user = folder.parent.parent, os.geteuid()
    found = next(place for place in (cache, *cache.parents) if place.exists())
    if user == 0 and found.stat().st_uid != user:
        # sudo keeps HOME: a folder or a file of root's would stand in the user's way.
        return False
    cache.mkdir(parents=True, exist_ok=True)
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, exist_ok=True)
        # A link of somebody else's would lead to any folder of this user's, in which the oldest files are removed.
        if {place.lstat().st_uid, place.stat().st_uid} != {user}:
            return False
    return True


def remove_oldest(folder: Path, files_max: int) -> None:
    """Remove the oldest files, so that `files_max` are left."""
    files = sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: file.stat().st_mtime)
    for file in files[:-files_max]:
        file.unlink()
