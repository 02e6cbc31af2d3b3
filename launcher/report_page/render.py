"""Makes HTML of the page's content (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import jinja2

from elaunch.launcher.report_page import wording
from elaunch.launcher.report_page.goodput import Goodput, Stage, StagePart, by_stage
from elaunch.launcher.report_page.lanes import LaneStage
from elaunch.launcher.report_page.page import Page, headline, subline
from elaunch.launcher.report_page.wording import moment, offset

# A bar of more parts than this shows only how long each stage took in all.
_PARTS_MAX = 4000
_TICK_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30),
    *(60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 14400, 21600, 43200, 86400),
)
_FILTERS = (wording.count, wording.cut, wording.duration, wording.offset, wording.percent, wording.printable)


def render(page: Page, template: str) -> str:
    """The HTML. jinja2 escapes every value; what the page's script reads is JSON without `<`."""
    history = page.history
    return _compiled(template).render(
        page=page,
        history=history,
        goodput=page.goodput,
        headline=headline(history, page.goodput),
        subline=subline(history),
        stages=by_stage(page.goodput),
        parts=_drawn(page.goodput),
        Stage=Stage,
        doings=[doing for doing in LaneStage if any(bar.doing is doing for lane in page.lanes for bar in lane.bars)],
        hosts=list(dict.fromkeys(node.host for node in history.nodes)),
        ticks=_time_ticks(history.wall_s),
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


def _drawn(found: Goodput) -> Sequence[StagePart]:
    if len(found.parts) <= _PARTS_MAX:
        return found.parts
    return [StagePart(stage, 0.0, seconds, found.parts[-1].generation) for stage, seconds in by_stage(found)]


def _time_ticks(wall_s: float) -> Sequence[tuple[float, str]]:
    """The timeline's ticks as (share of the width, words)."""
    step = next((each for each in _TICK_STEPS if wall_s / each <= 10), 86400 * math.ceil(wall_s / 864000))
    number = int(wall_s / step) if wall_s > 0 else 0
    return (
        [(i * step / wall_s, "0" if i == 0 else offset(i * step).removesuffix(".0")) for i in range(number + 1)]
        if wall_s > 0
        else []
    )
