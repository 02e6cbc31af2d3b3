"""The user's request is wrong: said in one sentence, exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(Exception):
    """What cannot be done as asked; the message is one sentence with the values and the way out."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely meant, if one is near."""
    import difflib  # Only on the way to an error: a tenth of the launcher's import time.

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
