"""What a measurement says that lacks a library."""

from __future__ import annotations

import pytest

from bench.libraries import require


def test_a_measurement_that_lacks_a_library_names_it_and_the_environment_that_has_it() -> None:
    with pytest.raises(SystemExit) as ended:
        require("bench.ecosystem", ("json.decoder", "not_there_at_all.part"))

    said = str(ended.value.code)
    assert said.startswith("bench.ecosystem needs not_there_at_all, not installed in ")
    assert "make .venv-ecosystem/.installed" in said
    assert ".venv-ecosystem/bin/python -m bench.ecosystem" in said


def test_a_measurement_that_has_its_libraries_goes_on() -> None:
    require("bench.ecosystem", ("json.decoder", "pytest"))
