"""What of the default preload a program cannot use, from the text of the program: its workers do not wait for that.

Nothing is imported or run. A program that cannot be read, or that imports in a way that its text does not show, may
use all of it. A wrong answer costs time, and nothing else: a worker imports what is not preloaded.
"""

from __future__ import annotations

import _ast
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.rendezvous.job_spec import ProgramKind

# These import modules by names that a text need not show.
_HIDING = {"importlib", "pickle", "pkgutil", "runpy", "__import__", "exec", "eval"}
# Packages that are not of the standard library, and are known to import nothing else that matters here.
_KNOWN = {"torch", "numpy"}
_IMPORTS_TORCH = re.compile(rb"^[ \t]*(import|from)[ \t]+torch\b", re.MULTILINE)
_WITHOUT_DYNAMO = tuple(name for name in DEFAULT_PRELOAD if name != "torch._dynamo")
# The parts of torch that import torch._dynamo, at their own import or when they are called.
_USES_DYNAMO = re.compile(
    rb"(?i)optim|compile|dynamo|parallel|fsdp|shard|replicate|pipelin|checkpoint|mesh|dtensor|distribute_|export|onnx"
    rb"|flex|attention.bias|varlen|sparse|nested|library|debug|composable|prims|\b(fx|func|jit|ao|hub)\b"
)
# A larger program pays less by waiting.
_FILES_MAX = 50
_BYTES_MAX = 200_000


def needless_imports(kind: ProgramKind, target: str) -> tuple[str, ...]:
    """The modules of DEFAULT_PRELOAD that neither the program nor one of the modules beside it can use."""
    try:
        used = _used(kind, target)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(name for name in DEFAULT_PRELOAD if name not in used)


def _used(kind: ProgramKind, target: str) -> tuple[str, ...]:
    if kind is ProgramKind.MODULE:
        root = Path.cwd()
        files = list(_files(root, target)) + list(_files(root, f"{target}.__main__"))
    else:
        script = Path(os.path.realpath(target))
        root, files = (script, [script / "__main__.py"]) if script.is_dir() else (script.parent, [script])
    if not files or os.environ.get("PYTHONSAFEPATH"):
        return DEFAULT_PRELOAD
    uses_torch = uses_dynamo = False
    seen: set[Path] = set()
    while files:
        file = files.pop()
        if file in seen:
            continue
        seen.add(file)
        if not file.is_file():
            # A pipe can be read only once, and the program needs it.
            return DEFAULT_PRELOAD
        text = file.read_bytes()
        if len(seen) > _FILES_MAX or len(text) > _BYTES_MAX:
            return DEFAULT_PRELOAD
        try:
            tree = _parsed(text, file)
        except SyntaxError:
            # Python refuses the program itself before any import. A zip file is a program too.
            return () if len(seen) == 1 and b"\0" not in text else DEFAULT_PRELOAD
        uses_torch = uses_torch or (b"torch" in text and (bool(_IMPORTS_TORCH.search(text)) or _names_torch(tree)))
        uses_dynamo = uses_dynamo or bool(_USES_DYNAMO.search(text))
        # Most programs that train say so in so many words, and need not be searched.
        if uses_torch and uses_dynamo:
            return DEFAULT_PRELOAD
        for name in _asked(tree, file, root):
            own = list(_files(root, name))
            files += own
            first = name.partition(".")[0]
            uses_torch = uses_torch or (first == "torch" and not own)
            if not own and (first in _HIDING or first not in sys.stdlib_module_names | _KNOWN):
                return DEFAULT_PRELOAD
    if uses_torch:
        return DEFAULT_PRELOAD if uses_dynamo else _WITHOUT_DYNAMO
    return ()


def _parsed(text: bytes, file: Path) -> object:
    with warnings.catch_warnings():
        # Python says these when it runs the program.
        warnings.simplefilter("ignore")
        return compile(text, str(file), "exec", _ast.PyCF_ONLY_AST)


def _names_torch(node: object) -> bool:
    """Whether a string in it names torch: one that is used, no docstring. Comments are not in it at all."""
    if isinstance(node, _ast.Constant):
        return "torch" in str(node.value)
    if isinstance(node, _ast.Expr) and isinstance(node.value, _ast.Constant):
        return False
    return any(_names_torch(child) for child in _children(node))


def _asked(tree: object, file: Path, root: Path) -> Iterator[str]:
    """The names of modules that the text of `file` imports, and of built-in functions that import."""
    package = file.parent.relative_to(root).parts
    for node in _walk(tree):
        if isinstance(node, _ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, _ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield base or "."
            # A module of that package, or something in it.
            yield from (each for alias in node.names if any(_files(root, each := f"{base}.{alias.name}".lstrip("."))))
        elif isinstance(node, _ast.Name) and node.id in _HIDING:
            yield node.id


def _walk(node: object) -> Iterator[object]:
    yield node
    for child in _children(node):
        yield from _walk(child)


def _children(node: object) -> Iterator[object]:
    for field in getattr(node, "_fields", ()):
        value = getattr(node, field, None)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, _ast.AST):
                yield each


def _files(root: Path, name: str) -> Iterator[Path]:
    """The files below `root` that an import of `name` runs, those of its packages too."""
    place = root
    for part in name.split("."):
        place = place / part
        for file in (place.with_name(f"{part}.py"), place / "__init__.py"):
            if part and file.is_file():
                yield file
