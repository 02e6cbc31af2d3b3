"""Quotes words so that bash reads them back byte for byte, without control characters in the text."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable


def quoted(word: str) -> str:
    """`word` as one word of bash, on one line.

    bash accepts a line break in quotes, but sbatch and logs would see two lines. So control characters, and bytes that
    are not UTF-8, are written in bash's form $'…'.
    """
    if word.isprintable():
        return shlex.quote(word)
    pieces = (
        each if each.isprintable() and each not in "'\\" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(each))
        for each in word
    )
    return f"$'{''.join(pieces)}'"


def joined(words: Iterable[str]) -> str:
    """The words as a command line of bash."""
    return " ".join(quoted(word) for word in words)


def is_one_line(text: str) -> bool:
    """Whether `text` has no line break and no other control character."""
    return not re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029]", text)
