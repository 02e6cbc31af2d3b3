"""launcher.doctor.command: which words are the command's own."""

from __future__ import annotations

import pytest

from elaunch.launcher.doctor.command import options_of, split
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import Options


@pytest.mark.parametrize(
    ("argv", "words", "is_json"),
    [
        ("--json", "", True),
        ("--nproc-per-node 2 --json t.py", "--nproc-per-node 2 t.py", True),
        ("t.py --json", "t.py --json", False),
        ("--json t.py --json", "t.py --json", True),
        ("-m pkg --json", "-m pkg --json", False),
        ("-- t.py --json", "-- t.py --json", False),
    ],
)
def test_json_after_the_script_is_the_scripts(argv: str, words: str, *, is_json: bool) -> None:
    assert split(argv.split()) == (words.split(), is_json)


def test_the_script_keeps_its_json_and_an_option_does_not_take_it_as_its_value() -> None:
    options = options_of(["--json", "t.py", "--json", "x"], {})

    assert isinstance(options, Options)
    assert options.typed == ("t.py", "--json", "x")
    with pytest.raises(UsageError, match="--log-dir needs a value"):
        options_of(["--log-dir", "--json"], {})
