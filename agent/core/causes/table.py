"""The table of recognised causes. `python -m` of this module prints docs/failures.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elaunch.agent.core.causes import collectives, gpu, memory, nodes, program, system
from elaunch.agent.core.causes.cause import CauseRule, Evidence, KnownCause, Question

# The first rule that applies has the word: a special cause stands before a general one.
ROOMS: tuple[tuple[str, tuple[CauseRule, ...]], ...] = (
    ("Memory", memory.RULES),
    ("GPUs", gpu.RULES),
    ("Nodes that differ", nodes.RULES),
    ("The script", program.RULES),
    ("Files, disks, networks and limits", system.RULES),
    ("Collectives", collectives.RULES),
)
RULES = tuple(rule for _, rules in ROOMS for rule in rules)
UNKNOWN = KnownCause()


def recognise(evidences: Sequence[Evidence]) -> KnownCause:
    """What is known about a failure. `evidences` are its exceptions, the first cause first."""
    for evidence in evidences:
        for rule in RULES:
            if found := rule.cause(evidence):
                return found
    return UNKNOWN


def questions(evidences: Sequence[Evidence]) -> frozenset[Question]:
    """What has to be found out on this host before `recognise` can be asked; for most failures it is nothing."""
    asked: set[Question] = set()
    for evidence in evidences:
        for rule in RULES:
            if rule.values(evidence) is not None:
                asked.update(rule.questions(evidence))
                if rule.more is None:
                    return frozenset(asked)
    return frozenset(asked)


_PAGE_HEAD = """\
# What the report says, and what to do

When a job fails, the report names the rank that failed first. If the cause is a usual one, a line says what to do next:

```sh
elaunch --nproc-per-node 2 train.py
```

```
Why it stopped: it never got past its start, so another try would end the same way.
Next step: install opencv-python in the Python environment of every node (python -m pip install opencv-python), …
```

A report without such a line is about a failure that elaunch does not know: wrong advice is worse than none. The
tables below are made from the rules in the code (`agent/core/causes/`). Words in *italics* stand for what the report
names. If several rules apply, the report uses the first.

For a crash (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) the report shows the Python stack of the worker, and its headline
has the innermost line of your own code. [A worker and a fresh python](fidelity.md) says how that works.
"""


def markdown() -> str:
    """The page docs/failures.md."""
    lines = [_PAGE_HEAD]
    for title, rules in ROOMS:
        lines += [f"## {title}", "", "| cause | next step |", "|---|---|"]
        lines += [f"| {rule.title} | {_shown(rule.shown or rule.advice)} |" for rule in rules]
        lines.append("")
    return "\n".join(lines)


def _shown(template: str) -> str:
    """A template for people: its values in italics, and nothing in it is Markdown or HTML."""
    escaped = re.sub(r"([<>|*_])", r"\\\1", template.replace("{limit}", ""))
    return re.sub(r"\{(\w+)\}", lambda m: f"*{m[1]}*", escaped)


if __name__ == "__main__":
    print(markdown(), end="")
