"""Print docs/failures.md, whose lists are made from the agent's rules.

    python docs/record/failures.py

A test holds the page equal to what this script prints.
"""

from __future__ import annotations

import re

from elaunch.agent.diagnosis.causes.table import SECTIONS

_HEAD = """\
# Failures: causes and next steps

When a job fails, the report names the rank that failed first. If the cause is a common one, a line has the next step:

```sh
elaunch --nproc-per-node 2 train.py
```

```
Why it stopped: it never got past its start, so another try would end the same way.
Next step: install opencv-python in the Python environment of every node (python -m pip install opencv-python), …
```

A report without such a line is about a failure that no rule matches: wrong advice is worse than none. The
lists below are made from the rules in the code (`agent/diagnosis/causes/`), each cause with its next step. *Italics*
stand for what the report names. If several rules apply, the report uses the first.

For a crash (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) the report shows the Python stack of the worker, and its headline
has the innermost line of your own code. [A worker and a fresh python](fidelity.md) explains how that works.
"""


def page() -> str:
    """The page: the rules of each section, each with its next step."""
    lines = [_HEAD]
    for title, rules in SECTIONS:
        lines += [f"## {title}", ""]
        first: dict[str, str] = {}
        for rule in rules:
            step = _shown(rule.shown or rule.advice)
            known = first.setdefault(step, rule.title)
            lines.append(f"- **{rule.title}**: {step if known == rule.title else f'as for “{known}”'}")
        lines.append("")
    return "\n".join(lines)


def _shown(template: str) -> str:
    """A template as Markdown: its values are in italics, all other special characters are escaped."""
    escaped = re.sub(r"([<>|*_])", r"\\\1", template.replace("{limit}", ""))
    return re.sub(r"\{(\w+)\}", lambda m: f"*{m[1]}*", escaped)


if __name__ == "__main__":
    print(page(), end="")
