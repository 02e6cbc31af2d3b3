"""What a program has imported: a worker's list of it, and what of that list a fork server might import in its place.

A worker makes the list while its program runs, so it imports nothing for that. The rest is the agent's.
"""

from __future__ import annotations

import os
import sys

# `typing` itself is not imported: a fresh worker imports this before its program.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_INSTALLED = ("/site-packages/", "/dist-packages/")
_STANDARD = os.path.dirname(os.__file__)  # noqa: PTH120


def listed(environment: Mapping[str, str]) -> bytes:
    """A line for each module of this process, in the order of their imports, and for each variable that has changed.

    `environment` is how it was before the program began.
    """
    now = dict(os.environ)
    changed = [name for name in {*environment, *now} if environment.get(name) != now.get(name)]
    lines = [f"variable\t{name}" for name in changed]
    for name, module in list(sys.modules.items()):
        # Entries may be anything. A lazy module would import more if it were asked for an attribute that it lacks.
        try:
            origin = vars(module)["__spec__"].origin
        except Exception:
            continue
        if isinstance(origin, str):
            lines.append(f"module\t{name}\t{origin}")
    return "\n".join(lines).encode(errors="replace")


def candidates(text: bytes, left_out: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules of installed packages in such a list that are not `left_out`, and the variables that have changed.

    Python's own modules come with those that need them. The rest is the user's code, which may change at any time.
    """
    names: dict[str, None] = {}
    variables: list[str] = []
    for line in text.decode(errors="replace").splitlines():
        match line.split("\t"):
            case ["variable", name]:
                variables.append(name)
            case ["module", name, origin] if name not in left_out and _is_in_package(name, origin):
                names[name] = None
    return tuple(names), tuple(sorted(variables))


def is_installed(name: str, origin: str) -> bool:
    """Whether a module is Python's own or of an installed package."""
    return name.partition(".")[0] in sys.stdlib_module_names or _is_in_package(name, origin)


def is_suitable(name: str, origins: Mapping[str, Collection[str]]) -> bool:
    """Whether a module is no code of the user, which may be another one at each start.

    `origins` are the files of modules, or the folders of a package without a text. A module without either was made by
    an importer of its package, as `six.moves`: it is of that package.
    """
    found = origins.get(name) or origins.get(name.partition(".")[0], ())
    # Some of Python's own have the platform in their name, which the list of names lacks.
    return any(is_installed(name, each) or os.path.dirname(each) == _STANDARD for each in found)  # noqa: PTH120


def _is_in_package(name: str, origin: str) -> bool:
    first = name.partition(".")[0]
    # A module of Python's own can be there too, where a package replaces it.
    return first not in sys.stdlib_module_names and any(folder in origin for folder in _INSTALLED)
