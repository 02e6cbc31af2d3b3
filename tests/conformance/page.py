"""Prints the tables of docs/torchrun.md, which are made from the options' table and from the list of behaviours.

    python -m tests.conformance.page

A test holds the page equal to what this prints.
"""

from __future__ import annotations

from elaunch.launcher.options.command_line import Option
from elaunch.launcher.options.table import TABLE
from tests.conformance.behaviours import LIST


def tables() -> tuple[str, str]:
    """torchrun's options, those that mean the same in one row, and the behaviours."""
    same = ", ".join(_names(spec) for spec in TABLE if spec.peer and not (spec.differs or spec.no_effect))
    options = [_option_row(spec) for spec in TABLE if spec.peer and (spec.differs or spec.no_effect)]
    behaviours = [f"| {each.number} | {each.fact} | {each.differs or 'the same'} |" for each in LIST]
    return (
        "\n".join(["| torchrun's option | here | torchrun |", "|---|---|---|", *options, f"| {same} | the same | |"]),
        "\n".join(["| | torchrun | elaunch |", "|---|---|---|", *behaviours]),
    )


def _names(spec: Option) -> str:
    names = [f"`-{spec.short}`"] if spec.short else []
    return ", ".join([*names, f"`--{spec.peer}`"])


def _option_row(spec: Option) -> str:
    if spec.no_effect:
        return f"| {_names(spec)} | accepted, no effect: {spec.no_effect} |  |"
    own = f"`--{spec.long}`: " if spec.long != spec.peer else ""
    default = f" [{spec.default_text}]" if spec.default_text else ""
    return f"| {_names(spec)} | {own}{spec.help}{default} | {spec.differs} |"


if __name__ == "__main__":
    print("\n\n".join(tables()))
