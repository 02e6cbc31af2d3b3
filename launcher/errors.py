"""Errors that end elaunch before a job runs. Each message is one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SiteError(Exception):
    """Something that the job needs is not available now: an address, a server. Exit code 3."""


class UsageError(Exception):
    """The user's request cannot be done. The message has its values and the way out. Exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`; None if no word is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)
