"""`make docs`: the site is built, has every page, and loads nothing from another host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness import REPOSITORY

pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
DOCS = REPOSITORY / "docs"
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]


def build(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [*BUILD, str(folder / "site"), "--config-file", str(config)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.thorough
def test_the_site_has_every_page_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    built = build(tmp_path, REPOSITORY / "mkdocs.yml")
    assert built.returncode == 0, built.stderr

    site = tmp_path / "site"
    pages = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    assert [page for page in pages if not (site / page).exists()] == []
    decisions = (site / "decisions" / "index.html").read_text()
    assert [
        path.name for path in (DOCS / "decisions").glob("*.md") if path.with_suffix(".html").name not in decisions
    ] == []
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        text = page.read_text()
        # Python-Markdown wants a blank line before a list or a table, and shows it as running text without one.
        assert not re.search(r"<p>[^<]*\n(?:- |\| )", text), page
        assert loads.findall(text) == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.thorough
def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    # Two pages are enough, with the settings of the whole site.
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "slurm.md", tmp_path / "docs")
    (tmp_path / "docs" / "index.md").write_text("[one](nowhere.md) and [another](slurm.md#nothing-of-that-name)\n")
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    config |= {"hooks": [str(DOCS / "hooks.py")], "nav": [{"Start": "index.md"}, {"Slurm": "slurm.md"}]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))

    built = build(tmp_path, tmp_path / "mkdocs.yml")

    assert built.returncode != 0
    assert "nowhere.md" in built.stderr
    assert "nothing-of-that-name" in built.stderr
