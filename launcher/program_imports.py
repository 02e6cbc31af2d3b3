"""What of the default preload a program does not use, from the text of the program: its workers do not wait for that.

Nothing is imported or run. A program that cannot be read, or that imports in a way that its text does not show, may
use all of it. A wrong answer costs time, and nothing else: a worker imports what is not preloaded.
"""

from __future__ import annotations

import _ast
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from elaunch.agent.config import ProgramText
from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.digests import sha256
from elaunch.rendezvous.job_spec import ProgramKind

# These import modules by names that a text need not show.
_HIDING = {"importlib", "pickle", "pkgutil", "runpy", "__import__", "exec", "eval"}
# Packages that do not import torch or torch._dynamo by themselves. What torch imports, `_USES_DYNAMO` finds.
_KNOWN = {"torch", "numpy"}
_IMPORTS_TORCH = re.compile(rb"^[ \t]*(import|from)[ \t]+torch\b", re.MULTILINE)
_WITHOUT_DYNAMO = ("torch._dynamo",)
# The parts of torch that import torch._dynamo, at their own import or when they are called.
_USES_DYNAMO = re.compile(
    rb"(?i)optim|compile|dynamo|parallel|fsdp|shard|replicate|pipelin|checkpoint|mesh|dtensor|distribute_|export|onnx"
    rb"|flex|attention.bias|varlen|sparse|nested|library|debug|composable|prims|dispatch|flop_counter|while_loop"
    rb"|\b(cond|fx|func|jit|ao|hub)\b"
)
# Reading and parsing more would itself delay the start.
_FILES_MAX = 50
_BYTES_MAX = 200_000

_UNKNOWN = ProgramText()


def program_text(kind: ProgramKind, target: str, args: tuple[str, ...]) -> ProgramText:
    """What the texts of the program and of the modules beside it show."""
    try:
        files, root = _program_files(kind, target)
        if not files:
            # An installed module, or elaunch's own that runs a function: its text is not read.
            return ProgramText(state=_digest([target, *args]), is_clear=False)
        if os.environ.get("PYTHONSAFEPATH"):
            # Modules beside the program are not found then, but elsewhere.
            return _UNKNOWN
        return _shown(files, root, args, is_script=kind is ProgramKind.SCRIPT)
    except (OSError, ValueError, RecursionError, MemoryError):
        return _UNKNOWN


def _program_files(kind: ProgramKind, target: str) -> tuple[list[Path], Path]:
    """The files that run first, and the folder of the modules beside the program."""
    if kind is ProgramKind.MODULE:
        root = Path.cwd()
        return [*_files(root, target), *_files(root, f"{target}.__main__")], root
    script = Path(os.path.realpath(target))
    return ([script / "__main__.py"], script) if script.is_dir() else ([script], script.parent)


def _shown(files: list[Path], root: Path, args: tuple[str, ...], *, is_script: bool) -> ProgramText:
    uses_torch = uses_dynamo = False
    is_clear = True
    texts: dict[Path, bytes] = {}
    while files:
        file = files.pop()
        if file in texts:
            continue
        if not file.is_file():
            # A pipe can be read only once, and the program needs it.
            return _UNKNOWN
        text = texts[file] = file.read_bytes()
        if len(texts) > _FILES_MAX or sum(map(len, texts.values())) > _BYTES_MAX:
            return _UNKNOWN
        uses_torch = uses_torch or bool(_IMPORTS_TORCH.search(text))
        uses_dynamo = uses_dynamo or bool(_USES_DYNAMO.search(text))
        try:
            tree = _parsed(text, file)
        except SyntaxError:
            # A zip file is a program too. Of a module, its package runs first.
            return ProgramText(is_refused=is_script and len(texts) == 1 and b"\0" not in text)
        uses_torch = uses_torch or (b"torch" in text and _names_torch(tree))
        if uses_torch and uses_dynamo:
            # Most programs that train say so in so many words, and need not be searched.
            return _UNKNOWN
        for name in _asked(tree, file, root):
            own = list(_files(root, name))
            files += own
            first = name.partition(".")[0]
            uses_torch = uses_torch or (first == "torch" and not own)
            is_known = first in _KNOWN or (first in sys.stdlib_module_names and first not in _HIDING)
            is_clear = is_clear and (bool(own) or is_known)
    if uses_torch and uses_dynamo:
        return _UNKNOWN
    state = _digest([*args, *(sha256(texts[file]).hexdigest() for file in sorted(texts))])
    if not is_clear:
        return ProgramText(state=state, is_clear=False)
    return ProgramText(_WITHOUT_DYNAMO if uses_torch else DEFAULT_PRELOAD, state)


def _digest(seen: list[str]) -> str:
    return sha256(json.dumps(seen).encode()).hexdigest()


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
