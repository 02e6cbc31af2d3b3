"""Print the table of events in docs/files.md, which is made from docs/events.schema.json.

    python docs/record/events.py

A test holds the page equal to what this script prints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = json.loads((Path(__file__).parents[1] / "events.schema.json").read_text())
# What many events share has a section of its own below the table.
_SHARED = "failure"


def table() -> str:
    """One row for each event: its name, what happened, and the names of its own fields."""
    events = {name: event for name, event in SCHEMA["$defs"].items() if name != _SHARED}
    rows = [f"| `{name}` | {event['description']} | {_fields(event)} |" for name, event in events.items()]
    return "\n".join(["| `event` | what happened | its own fields |", "|---|---|---|", *rows])


def failure_fields() -> str:
    """The fields of a failure, as a list in one sentence."""
    return _fields(SCHEMA["$defs"][_SHARED])


def _fields(event: dict[str, Any]) -> str:
    if "$ref" in event:
        return "those of a failure"
    return ", ".join(f"`{name}`" for name in event.get("properties", {}))


if __name__ == "__main__":
    print(f"{table()}\n\nA failure's fields are {failure_fields()}.")
