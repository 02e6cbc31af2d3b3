"""tests/promises.md: each promise is still on its page, and each test that holds one is there."""

from __future__ import annotations

import re
from importlib.metadata import metadata, requires

from tests.conformance.behaviours import LIST
from tests.harness import REPOSITORY

SECTIONS = re.split(r"^## (\S+)$", (REPOSITORY / "tests" / "promises.md").read_text(), flags=re.MULTILINE)[1:]
PROMISES = {
    page: [re.split(r"(?<!\\)\|", line)[1:3] for line in text.splitlines() if line.startswith("| ")][1:]
    for page, text in zip(SECTIONS[::2], SECTIONS[1::2], strict=True)
}
PAGES = ("README.md", "docs/torchrun.md", "docs/security.md", "docs/failures.md")


def _plain(markdown: str) -> str:
    """The words of a page: no emphasis, no code marks, links as their texts."""
    linked = re.sub(r"\[((?:`[^`]*`|[^][])*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[`*\\]", "", linked).split())


def test_each_promise_is_on_its_page() -> None:
    missing = []
    for page in PAGES:
        text = _plain((REPOSITORY / page).read_text())
        missing += [(page, words) for words, _ in PROMISES[page] if _plain(words) not in text]

    assert missing == []


def test_each_test_that_holds_a_promise_is_there() -> None:
    tests = {test.strip() for promises in PROMISES.values() for _, test in promises}

    assert len(tests) > 100
    assert sorted(test for test in tests if not _is_there(test)) == []


def _is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = REPOSITORY / "tests" / file
    return path.is_file() and bool(re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE))


def test_each_behaviour_of_torchrun_has_a_line() -> None:
    words = [_plain(words) for words, _ in PROMISES["docs/torchrun.md"]]
    facts = {behaviour.number: _plain(f"{behaviour.fact} {behaviour.differs}") for behaviour in LIST}

    assert [number for number, fact in facts.items() if not any(found in fact for found in words)] == []


def test_readme_names_the_versions_and_the_packages_of_pyproject() -> None:
    needs = [line for line in requires("elaunch") or () if "extra ==" not in line]
    packages = dict(re.findall(r"^([\w-]+)(?:>=([\d.]+))?", line)[0] for line in needs)
    sentence = _plain((REPOSITORY / "README.md").read_text()).partition("elaunch needs ")[2]
    names = re.split(", | and ", sentence.partition("installs ")[2].partition(", if ")[0].lower())

    assert f"Python {metadata('elaunch')['Requires-Python'].removeprefix('>=')} " in sentence
    assert f"torch {packages.pop('torch')}, or newer" in sentence
    assert sorted(names) == sorted(name.lower() for name in packages)
