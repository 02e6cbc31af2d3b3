"""Errors that end elaunch before a job runs. Each message is one sentence."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


class SiteError(Exception):
    """Something that the job needs is not available now: an address, a server. Exit code 3."""


class UsageError(Exception):
    """The user's request cannot be done. The message has its values and the way out. Exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`; None if no word is similar."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def tidy(path: str) -> str:
    """`path` for people: without `/./`, `//` and `x/..`, unless that is another place since `x` is a link."""
    if "\0" in path:
        return path  # No file has such a name, and the system's calls refuse it.
    short = os.path.normpath(path).replace("//", "/")
    if path.startswith("./") and not short.startswith((".", "/")):
        # Without it a word may be a command.
        short = f"./{short}"
    return short if os.path.realpath(short) == os.path.realpath(path) else path
