"""Every page says what it is for and has a command before its first table; what is drawn or counted is of today."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.event_schema import EVENTS
from tests.harness import REPOSITORY

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
README_LINES_MAX = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_opens_with_what_it_is_for_and_a_command(page: Path) -> None:
    title, opening = page.read_text().split("\n", 1)
    first = opening.strip().split("\n", 1)[0]

    assert title.startswith("# ")
    assert re.match(r"[A-Z`*e]", first), f"{page.name} begins with {first!r}, not with a sentence"
    table, fence = (
        found.start() if (found := re.search(pattern, opening, re.MULTILINE)) else len(opening)
        for pattern in (r"^\|", r"^```(?:sh|python)$")
    )
    assert fence < table, f"{page.name} has a table, or nothing, before its first command"


def test_readme_is_short_and_its_figures_are_those_of_the_measurements() -> None:
    text = README.read_text()
    measured = "".join(page.read_text() for page in (REPOSITORY / "bench" / "results").glob("*.md"))

    assert len(text.splitlines()) <= README_LINES_MAX
    rows = re.findall(r"^\| (?:from|the same|steps).* \| (.*) \| (.*) \|$", text, re.MULTILINE)
    figures = [figure for row in rows for cell in row for figure in re.findall(r"\d+\.\d+", cell)]
    assert len(rows) == 6
    assert len(figures) >= 10
    assert [figure for figure in figures if not re.search(rf"\| +{re.escape(figure)} \|", measured)] == []


def test_the_schema_has_each_event_that_the_agent_stamps_and_no_other() -> None:
    text = "\n".join(path.read_text() for path in (REPOSITORY / "agent").rglob("*.py"))
    stamped = set(re.findall(r"(?:\.stamp\(|Entry\()[^,()\"]+,\s*\"(\w+)\"", text))
    # A few names are chosen a line before; those of the worker store's process are put together.
    named = {event for event in EVENTS if f'"{event.removeprefix("store_")}"' in text or f'"{event}"' in text}

    assert len(stamped) >= 25
    assert stamped <= EVENTS
    assert named == EVENTS


def test_the_page_of_failures_is_made_from_the_rules() -> None:
    made = runpy.run_path(str(DOCS / "record" / "failures.py"))

    assert (DOCS / "failures.md").read_text() == made["page"](), "run: python docs/record/failures.py"


def test_the_pages_about_options_are_made_from_their_table() -> None:
    made = runpy.run_path(str(DOCS / "record" / "options.py"))

    assert (DOCS / "options.md").read_text() == made["markdown"](), "run: python docs/record/options.py"
    assert (DOCS / "elaunch.1").read_text() == made["manual"](), "run: python docs/record/options.py man"


@pytest.mark.parametrize("script", ["diagrams.py", "plans.py"])
def test_the_diagrams_are_what_the_script_draws(script: str) -> None:
    drawn = runpy.run_path(str(DOCS / "record" / script))["PICTURES"]

    for name, draw in drawn.items():
        assert (DOCS / "images" / name).read_text() == draw(), f"run: python docs/record/{script} docs/images ({name})"


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_loads_nothing_from_elsewhere(picture: Path) -> None:
    root = xml.etree.ElementTree.fromstring(picture.read_text())

    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert re.findall(r"(?:https?:)?//[^\"' )]+", picture.read_text()) == ["http://www.w3.org/2000/svg"]


def test_the_recorded_job_lost_a_rank_and_ended_well() -> None:
    shown = "\n".join(xml.etree.ElementTree.fromstring((DOCS / "images" / "lost-rank.svg").read_text()).itertext())

    for words in ("killed by SIGKILL in generation 0", "generation 1: 2 workers", "goes on after step 20", "echo $?\n"):
        assert words in shown
