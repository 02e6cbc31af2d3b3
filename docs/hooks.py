"""What `mkdocs build` does beyond mkdocs.yml: generated pages, and links into the repository.

The site has the decisions with an index of their titles, and CONTRIBUTING.md and CHANGELOG.md as pages. A link from a
page to a file of the repository becomes the file's name, since the site does not have it; a broken link fails the
build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
INDEX = "decisions/index.md"
# Files of the repository that are pages of the site.
COPIES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
INDEX_HEAD = """\
# Decisions

These pages explain why elaunch is as it is, one decision on each: what was at stake, what was chosen, and what follows.
A change that undoes one of them begins by reading it.

"""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def decisions() -> list[Path]:
    """The pages of all decisions, oldest first."""
    return sorted((DOCS / "decisions").glob("[0-9]*.md"))


def index() -> str:
    """The page that lists them by their titles."""
    titles = ((path.name, path.read_text().split("\n", 1)[0].removeprefix("# ")) for path in decisions())
    return INDEX_HEAD + "".join(f"- [{title}]({name})\n" for name, title in titles)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the decisions into the navigation."""
    for entry in config.nav or []:
        if "Decisions" in entry:
            entry["Decisions"] = [INDEX, *(f"decisions/{path.name}" for path in decisions())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    files.append(File.generated(config, INDEX, content=index()))
    for source, page in COPIES.items():
        text = (REPOSITORY / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into their names."""
    folder = (DOCS / page.file.src_uri).parent

    def in_site(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if ":" in target:
            return found[0]
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(DOCS):
            return found[0]
        name = path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else ""
        if name in COPIES:
            return f"[{text}]({COPIES[name]}{anchor})"
        if not name or not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which is not in the repository")
        return text if text.strip("`") == name else f"{text} (`{name}`)"

    return _LINK.sub(in_site, markdown)
