"""What a program imports, by its text: packages that are preloaded too, and what of the default preload it cannot use.

Nothing is imported or run. A program that cannot be read, or that imports in a way that its text does not show, may
use all of the default. A wrong answer costs time, and nothing else: a worker imports what is not preloaded.
"""

from __future__ import annotations

import _ast
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from elaunch.agent.config import ProgramText
from elaunch.agent.default_preload import DEFAULT_PRELOAD, PACKAGES
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
# torch._dynamo reads such variables when it is imported. A program that names one sets it before its first optimizer.
_SETS_DYNAMO = re.compile(rb"\b(?:TORCHDYNAMO|TORCHINDUCTOR|TORCH_COMPILE|TORCH_DYNAMO)_[A-Z]")
# Reading and parsing more would itself delay the start.
_FILES_MAX = 50
_BYTES_MAX = 200_000

_UNKNOWN = ProgramText()

_IMPORT = re.compile(
    rb"(?:^|;)[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n;]*)|import[ \t]+([^\n;]*))",
    re.MULTILINE,
)
_COMMENT = re.compile(rb"#[^\n]*")
# These read such variables when they are imported. A program that names one may set it before.
_SETS = re.compile(rb"\b(?:ACCELERATE|DATASETS|HF|HUGGING_?FACE|HYDRA|LIGHTNING|PL|TRANSFORMERS|USE)_[A-Z]|dotenv")


def program_text(kind: ProgramKind, target: str) -> ProgramText:
    """What the texts of the program and of the modules beside it show."""
    try:
        files, root = _program_files(kind, target)
        if not files:
            # An installed module, or elaunch's own that runs a function: its text is not read.
            return _UNKNOWN
        if os.environ.get("PYTHONSAFEPATH"):
            # Modules beside the program are not found then, but elsewhere.
            return _UNKNOWN
        shown = _shown(files, root, is_script=kind is ProgramKind.SCRIPT)
        return shown if shown.is_refused else replace(shown, packages=_packages(files, root))
    except (OSError, ValueError, RecursionError, MemoryError):
        return _UNKNOWN


def _program_files(kind: ProgramKind, target: str) -> tuple[list[Path], Path]:
    """The files that run first, and the folder of the modules beside the program."""
    if kind is ProgramKind.MODULE:
        root = Path.cwd()
        return [*_files(root, target), *_files(root, f"{target}.__main__")], root
    script = Path(os.path.realpath(target))
    return ([script / "__main__.py"], script) if script.is_dir() else ([script], script.parent)


def _shown(files: Sequence[Path], root: Path, *, is_script: bool) -> ProgramText:
    uses_torch = uses_dynamo = False
    is_clear = True
    texts: dict[Path, bytes] = {}
    files = [*files]
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
        if _SETS_DYNAMO.search(text):
            return ProgramText(_WITHOUT_DYNAMO)
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
    if not is_clear:
        return _UNKNOWN
    return ProgramText(_WITHOUT_DYNAMO if uses_torch else DEFAULT_PRELOAD)


def _packages(files: Sequence[Path], root: Path) -> tuple[str, ...]:
    """What these files, and those beside them that they import, import of PACKAGES; nothing if they may set it up."""
    found: dict[str, None] = {}
    seen: set[Path] = set()
    files, size = [*files], 0
    while files and len(seen) < _FILES_MAX and size < _BYTES_MAX:
        file = files.pop(0)
        if file in seen or not file.is_file():
            continue
        text = file.read_bytes()
        seen.add(file)
        size += len(text)
        if _SETS.search(text):
            return ()
        for module, names in _imported(text, file, root):
            own = [each for name in (module, *(f"{module}.{name}" for name in names)) for each in _files(root, name)]
            files += own
            if not own and module.partition(".")[0] in PACKAGES:
                found |= dict.fromkeys([f"{module}:{name}" for name in names] or [module])
    return tuple(found)


def _imported(text: bytes, file: Path, root: Path) -> Iterator[tuple[str, list[str]]]:
    """The modules that a text imports, and the names that it imports from each."""
    package = file.parent.relative_to(root).parts
    for dots, base, names, modules in _IMPORT.findall(text.replace(b"\\\n", b" ")):
        items = [item.split() for item in _COMMENT.sub(b"", names or modules).strip(b"() \t\r").split(b",")]
        words = [item[0].decode() for item in items if item and item[0].isascii()]
        if modules:
            yield from ((word, []) for word in words)
        else:
            above = package[: len(package) + 1 - len(dots)] if dots else ()
            yield ".".join((*above, *filter(None, [base.decode()]))), [word for word in words if word.isidentifier()]


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
