"""Says which libraries a measurement lacks, before it starts anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

_ENVIRONMENT = ".venv-ecosystem"


def require(measurement: str, modules: Iterable[str]) -> None:
    """End this process with a sentence if one of `modules` is not installed. `measurement` is what `python -m` runs."""
    packages = {name.partition(".")[0] for name in modules}
    if missing := sorted(name for name in packages if find_spec(name) is None):
        sys.exit(
            f"{measurement} needs {' and '.join(missing)}, not installed in {sys.prefix}:"
            f" `make {_ENVIRONMENT}/.installed` makes an environment with it,"
            f" and `{_ENVIRONMENT}/bin/python -m {measurement}` uses that"
        )
