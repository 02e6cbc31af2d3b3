"""What ends elaunch before a job runs: said in one sentence."""

from __future__ import annotations

from collections.abc import Iterable


class SiteError(Exception):
    """What a job needs is not there now: an address, a server. Exit code 3."""


class UsageError(Exception):
    """The user's request cannot be done; the message has its values and the way out. Exit code 2."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely meant, if one is near."""
    import difflib  # Only on the way to an error: a tenth of the launcher's import time.

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
