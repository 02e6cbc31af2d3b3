"""A trace's content: Chrome's JSON, packed and unpacked."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

# Of gzip, for all files of a profile.
LEVEL = 6


def parsed(content: bytes) -> Mapping[str, Any]:
    """The trace as a value. Raises ValueError: kineto does not say that a disk is full, and leaves a part of a file."""
    try:
        # A name in it may be any bytes.
        trace = json.loads(content.decode(errors="replace"), strict=False)
    except RecursionError:
        raise ValueError("the trace is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the profiler left no whole trace ({error.msg}, at character {error.pos:,})") from None
    if not isinstance(trace, Mapping):
        raise ValueError("the profiler left no trace")
    return trace


def packed(content: bytes) -> bytes:
    return gzip.compress(content, LEVEL)


def unpacked(content: bytes) -> bytes:
    """Raises OSError, EOFError or ValueError."""
    return gzip.decompress(content)
