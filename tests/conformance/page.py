"""Prints the table of behaviours in docs/torchrun.md, which is made from the list.

    python -m tests.conformance.page

A test holds the page equal to what this prints.
"""

from __future__ import annotations

from tests.conformance.behaviours import LIST


def table() -> str:
    """The behaviours, a row for each."""
    rows = [f"| {each.number} | {each.fact} | {each.differs} |" for each in LIST]
    return "\n".join(["| | torchrun | elaunch |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
