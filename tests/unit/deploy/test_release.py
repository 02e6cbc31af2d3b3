"""deploy/release/release.py: what it says of a wheel before the upload."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPOSITORY


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "deploy" / "release" / "release.py"))


def wheel_with(folder: Path, *lines: str) -> Path:
    path = folder / "elaunch-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(
            "elaunch-1.0.dist-info/METADATA", "\n".join(("Metadata-Version: 2.4", "Name: elaunch", *lines, ""))
        )
    return path


def test_a_wheel_without_the_projects_addresses_is_told(tmp_path: Path, release: dict[str, Any]) -> None:
    said = release["without_address"](release["metadata_of"](wheel_with(tmp_path)))

    assert said.startswith("pyproject.toml has no [project.urls]")


def test_a_wheel_with_an_address_is_fit(tmp_path: Path, release: dict[str, Any]) -> None:
    wheel = wheel_with(tmp_path, "Project-URL: Repository, https://example.org/elaunch")

    assert release["without_address"](release["metadata_of"](wheel)) == ""


def test_what_a_user_chooses_is_not_installed(tmp_path: Path, release: dict[str, Any]) -> None:
    wheel = wheel_with(
        tmp_path, "Requires-Dist: torch>=2.6", "Requires-Dist: rich>=13", 'Requires-Dist: x; extra == "y"'
    )

    assert release["needed"](wheel) == ["rich>=13"]
