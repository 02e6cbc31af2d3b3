"""Prints the tables of docs/torchrun.md, which are made from the options' table and from the list of behaviours.

    python -m tests.conformance.page

A test holds the page equal to what this prints.
"""

from __future__ import annotations

from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.table import TABLE
from tests.conformance.behaviours import LIST


def tables() -> tuple[str, str]:
    """torchrun's options, and the behaviours."""
    options = [_option_row(spec) for spec in TABLE if spec.peer]
    behaviours = [f"| {each.number} | {each.fact} | {each.differs or 'the same'} |" for each in LIST]
    return (
        "\n".join(["| torchrun's option | here | torchrun |", "|---|---|---|", *options]),
        "\n".join(["| | torchrun | elaunch |", "|---|---|---|", *behaviours]),
    )


def _option_row(spec: Option) -> str:
    names = [f"`-{spec.short}`"] if spec.short else []
    names.append(f"`--{spec.peer}`")
    if spec.no_effect:
        here, theirs = f"accepted, no effect: {spec.no_effect}", spec.differs
    elif spec.differs:
        own = f"`--{spec.long}`: " if spec.long != spec.peer else ""
        here, theirs = (
            f"{own}{spec.help} [{spec.default_text}]" if spec.default_text else f"{own}{spec.help}",
            spec.differs,
        )
    else:
        here, theirs = "the same", ""
    return f"| {', '.join(names)} | {here} | {theirs} |"


if __name__ == "__main__":
    print("\n\n".join(tables()))
