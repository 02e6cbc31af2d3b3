"""Makes HTML of the page's content (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import jinja2

from elaunch.launcher.report_page import wording
from elaunch.launcher.report_page.goodput import Stage, StagePart, by_stage
from elaunch.launcher.report_page.history import PastGeneration
from elaunch.launcher.report_page.lanes import LaneMark, LaneStage, MarkKind
from elaunch.launcher.report_page.page import Page, headline, subline
from elaunch.launcher.report_page.wording import moment, offset

# Of a table with more generations the page has the first and the last of them.
_GENERATIONS_MAX = 400
_TICK_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30),
    *(60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 14400, 21600, 43200, 86400),
)
_FILTERS = (wording.count, wording.cut, wording.duration, wording.offset, wording.percent, wording.printable)


def render(page: Page, template: str) -> str:
    """The HTML. jinja2 escapes every value; what the page's script reads is JSON without `<`."""
    history, lanes = page.history, page.lanes
    begin_s = lanes.begin_s
    length_s = max(history.wall_s - begin_s, 1e-3)
    return _compiled(template).render(
        page=page,
        history=history,
        goodput=page.goodput,
        headline=headline(history, page.goodput),
        subline=subline(history),
        stages=by_stage(page.goodput.parts),
        by_stage=by_stage,
        address=_address(page),
        drawn=_drawn,
        generations=_ends(page.generations, _GENERATIONS_MAX),
        Stage=Stage,
        doings=[doing for doing in LaneStage if any(bar.doing is doing for lane in lanes.shown for bar in lane.bars)],
        hosts=list(dict.fromkeys(node.name for node in history.nodes)),
        ticks=_time_ticks(begin_s, length_s),
        place=lambda at_s: f"{100 * (at_s - begin_s) / length_s:.4f}%",
        width=lambda seconds: f"{100 * seconds / length_s:.4f}%",
        wall_s=max(history.wall_s, 1e-3),
        moment=lambda at_s: moment(history.began_at + at_s, history.utc_offset_s),
        zone=f"UTC{history.utc_offset_s / 3600:+g}",
        is_known=lambda value: not math.isnan(value),
    )


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in _FILTERS}
    return environment.from_string(template)


def _address(page: Page) -> Callable[[LaneMark], str]:
    """Where the page tells of a mark: its card, or that of its generation's cause. Empty for one that is left out."""
    cards = {cause.fault.generation: f"#failure-{cause.number}" for cause in page.causes}
    warnings = {shown.number: f"#warning-{shown.number}" for shown in page.warnings}

    def address(mark: LaneMark) -> str:
        if mark.kind is MarkKind.WARNING:
            return warnings.get(mark.number, "")
        return cards.get(page.history.faults[mark.number].generation, "")

    return address


def _drawn(parts: Sequence[StagePart], limit: int) -> Sequence[StagePart]:
    """The parts; of more than `limit` only how long each stage took in all."""
    if len(parts) <= limit:
        return parts
    return [StagePart(stage, 0.0, seconds, parts[-1].generation) for stage, seconds in by_stage(parts)]


def _ends(rows: Sequence[PastGeneration], limit: int) -> tuple[Sequence[PastGeneration], Sequence[PastGeneration]]:
    """The first and the last of many rows; all in the first part if they are few."""
    return (rows, ()) if len(rows) <= limit else (rows[: limit // 2], rows[-(limit // 2) :])


def _time_ticks(begin_s: float, length_s: float) -> Sequence[tuple[float, str]]:
    """The timeline's ticks as (share of the width, words)."""
    step = next((each for each in _TICK_STEPS if length_s / each <= 10), 86400 * math.ceil(length_s / 864000))
    first, last = math.ceil(begin_s / step), math.floor((begin_s + length_s) / step)
    return [
        ((i * step - begin_s) / length_s, "0" if i == 0 else offset(i * step).removesuffix(".0"))
        for i in range(first, last + 1)
    ]
