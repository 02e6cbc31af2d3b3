"""Calls munge, the authentication service of a cluster. Only the same user can read a credential, on its hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

_CALL_S = 10.0
# unmunge's exit code for a credential that was read on this host before. Its text is still good.
_REPLAYED = 17


class MungeFailed(Exception):
    """munge is not installed, or it refuses. The message says why."""


def seal(text: str) -> str:
    """`text` as a credential, which only this user can open, on any host with the same munge key, for some minutes.

    Raises MungeFailed.
    """
    # Through stdin: every user can read a command line.
    return _call(["munge", "--restrict-uid", str(os.geteuid())], text).strip()


def unseal(credential: str) -> str:
    """The text in a credential that this user has made. Raises MungeFailed."""
    told = _call(["unmunge", "--keys", "STATUS,UID"], credential, (0, _REPLAYED))
    head, _, text = told.partition("\n\n")
    maker = re.search(r"^UID:.*\((\d+)\)$", head, re.MULTILINE)
    if not maker or int(maker[1]) != os.geteuid():
        raise MungeFailed("the credential belongs to another user")
    return text


def _call(command: list[str], text: str, codes: tuple[int, ...] = (0,)) -> str:
    if shutil.which(command[0]) is None:
        raise MungeFailed(f"no {command[0]} on the PATH")
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MungeFailed(f"{command[0]}: {error}") from None
    if done.returncode not in codes:
        raise MungeFailed(done.stderr.strip() or f"{command[0]} exited with {done.returncode}")
    return done.stdout
