"""Whatever stands in a timeline or in metrics gives a page without markup of theirs, numbers, and a trace."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.launcher.report_page.ending import Look
from elaunch.launcher.report_page.events import read_lines
from elaunch.launcher.report_page.goodput import goodput
from elaunch.launcher.report_page.history import NodeFolder, history
from elaunch.launcher.report_page.metrics import StepMetrics
from elaunch.launcher.report_page.page import make_page, summary
from elaunch.launcher.report_page.render import render
from elaunch.launcher.report_page.trace import trace
from tests.fuzzing import NESTED, VALUES, bounded, json_texts
from tests.unit.launcher.report_page.test_page import TEMPLATE, Tags
from tests.unit.launcher.report_page.timelines import BEGAN_AT, Timeline, restarted

# A job that is warned of, and has no end.
WARNED = restarted().add(61, 1, "seems_hung", host="node-a", rank=1, message="it runs").add(70, 1, "goes_on")
ROWS = WARNED.add(80, 1, "slow", rank=1, wait_percent=20).rows
ROWS[0]["pid"] = 7
del ROWS[[row["event"] for row in ROWS].index("ended")]
LOOK = Look(BEGAN_AT + 99, "node-a", frozenset({("night", 7)}))
LINES = [json.dumps(row) for row in ROWS]
METRIC = json.dumps({"step": 3, "loss": 1.0, "seconds": 0.1, "generation": 0, "at": 1.8e9, "steps_lost": 2})
# The markup of pages is the template's: these tags are in it as often as it says, whatever the job wrote.
CODE = ("script", "style", "img", "iframe", "object", "link", "form")


@st.composite
def timelines(draw: st.DrawFn) -> bytes:
    """A job's timeline with some fields or lines replaced, doubled or moved."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(lines) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                row = dict(draw(st.sampled_from(ROWS)))
                row[draw(st.sampled_from(sorted(row)))] = draw(VALUES)
                lines[place] = json.dumps(row)
            case 1:
                lines[place] = draw(json_texts(draw(st.sampled_from(LINES))))
            case 2:
                lines.insert(place, draw(st.sampled_from(LINES)))
            case _:
                del lines[place]
    return "\n".join(lines).encode(errors="surrogatepass")


@given(timelines(), st.lists(json_texts(METRIC), max_size=5))
@example(b"", [NESTED])
@example(Timeline().add(1e308, 0, "opened").add(-1e308, 2**31 - 1, "sealed").text, [])
# A rate that overflows, of workers whose forks are not in the log.
@example(Timeline().steps(4, 0, 9, first=1).steps(5, 0, 10, rate=1e-320).text, [])
@example(b"\n".join(b'{"generation": %d, "event": "opened", "at": 1, "monotonic_s": 1}' % n for n in range(3000)), [])
def test_any_timeline_gives_a_page_or_nothing(timeline: bytes, rows: list[str]) -> None:
    calm = Tags(_page(restarted().text, []))

    with bounded(cpu_s=4.0):
        page = _page(timeline, [row.encode(errors="surrogatepass") for row in rows])

    if page:
        page.encode()
        shown = Tags(page)
        assert all(shown.count(tag) <= calm.count(tag) + (tag == "script") for tag in CODE)


def _page(timeline: bytes, rows: list[bytes]) -> str:
    folder = NodeFolder("/logs/a", "a", "night", read_lines(timeline.splitlines(keepends=True)))
    if not folder.lines.events:
        return ""
    metrics = StepMetrics().add_all(rows)
    past = history([folder], metrics, LOOK)
    page = make_page(past, goodput(past), metrics, {}, {})
    json.dumps(summary(page), allow_nan=False)
    json.dumps(trace(past, page.goodput), allow_nan=False)
    return render(page, TEMPLATE)
