"""Print the list of events in docs/files.md, which is made from docs/events.schema.json.

    python docs/record/events.py

A test holds the page equal to what this script prints.
"""

from __future__ import annotations

import json
from pathlib import Path

SCHEMA = json.loads((Path(__file__).parents[1] / "events.schema.json").read_text())
# What many events share is no event.
_SHARED = "failure"


def listing() -> str:
    """A line for each event: its name, and what happened."""
    events = {name: event for name, event in SCHEMA["$defs"].items() if name != _SHARED}
    return "\n".join(f"- `{name}`: {event['description']}" for name, event in events.items())


if __name__ == "__main__":
    print(listing())
