"""Print the table of events in docs/files.md, which is made from docs/events.schema.json.

    python docs/record/events.py

A test holds the page equal to what this script prints.
"""

from __future__ import annotations

import json
from pathlib import Path

SCHEMA = json.loads((Path(__file__).parents[1] / "events.schema.json").read_text())
# What many events share is no event.
_SHARED = "failure"


def table() -> str:
    """One row for each event: its name, and what happened."""
    events = {name: event for name, event in SCHEMA["$defs"].items() if name != _SHARED}
    rows = [f"| `{name}` | {event['description']} |" for name, event in events.items()]
    return "\n".join(["| `event` | what happened |", "|---|---|", *rows])


if __name__ == "__main__":
    print(table())
