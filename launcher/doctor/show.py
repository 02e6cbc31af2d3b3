"""Shows what the checks have found: a table on a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from elaunch import __version__
from elaunch.launcher.doctor.checks import Checked
from elaunch.launcher.doctor.findings import Grade, worst

SCHEMA = 1
_STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.BAD: "bold red"}


def summary(checked: Sequence[Checked], host: str, took_s: float) -> str:
    """One sentence for all."""
    counts = Counter(finding.grade for each in checked for finding in each.findings)
    parts = [f"{counts[grade]} {grade.value}" for grade in Grade if counts[grade]]
    word = {
        Grade.OK: "this node can train",
        Grade.WARN: "this node can train; look at what is marked warn",
        Grade.BAD: "this node cannot train as asked",
    }[worst(each.grade for each in checked)]
    return f"{host}: {word} ({', '.join(parts)}; {took_s:.1f} s)"


def lines(checked: Sequence[Checked], host: str, took_s: float) -> Iterator[str]:
    """A line for each finding; the host's name is first, so that the output of many nodes can be sorted."""
    for each in checked:
        for finding in each.findings:
            advice = f" -> {finding.advice}" if finding.advice else ""
            yield f"{host}: {finding.grade.value:4} {each.name:10} {finding.found}{advice}"
    yield summary(checked, host, took_s)


def as_json(checked: Sequence[Checked], host: str, took_s: float) -> str:
    """One object in one line; docs/operations.md has its schema."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "elaunch": __version__,
            "host": host,
            "grade": worst(each.grade for each in checked).value,
            "seconds": round(took_s, 3),
            "checks": [
                {
                    "check": each.name,
                    "grade": each.grade.value,
                    "findings": [
                        {"grade": finding.grade.value, "found": finding.found, "advice": finding.advice}
                        for finding in each.findings
                    ],
                    "facts": None if each.facts is None else dataclasses.asdict(each.facts),
                }
                for each in checked
            ],
        }
    )


def print_table(checked: Sequence[Checked], host: str, took_s: float) -> None:
    """The table for a terminal. Raises ImportError without rich."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in checked:
        for number, finding in enumerate(each.findings):
            words = Text(finding.found)
            if finding.advice:
                words.append(f"\n-> {finding.advice}", style="bold")
            name = "" if number else each.name
            table.add_row(Text(finding.grade.value, style=_STYLES[finding.grade]), Text(name), words)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(summary(checked, host, took_s), style=_STYLES[worst(each.grade for each in checked)]))
