"""Scans a program's source for imports: packages to preload too, and modules of the default preload it cannot use.

Nothing is imported or run. A program that cannot be read, or whose source does not show all imports, may use all of
the default. A wrong result costs only time: a worker imports what is not preloaded.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from elaunch.agent.config import ProgramText
from elaunch.agent.environment import DEFAULT_PRELOAD, PACKAGES
from elaunch.rendezvous.types import ProgramKind

# These import modules whose names the source need not show.
_HIDING_MODULES = {"importlib", "pickle", "pkgutil", "runpy"}
_HIDING = re.compile(rb"(?<![.\w])(?:__import__|exec|eval)\(")
# numpy does not import torch, and of torch only what `_USES_DYNAMO` finds imports torch._dynamo.
_KNOWN = {"torch", "numpy"}
_WITHOUT_DYNAMO = ("torch._dynamo",)
# The parts of torch that import torch._dynamo, at their own import or when they are called.
_USES_DYNAMO = re.compile(
    rb"(?i)optim|compile|dynamo|parallel|fsdp|shard|replicate|pipelin|checkpoint|mesh|dtensor|distribute_|export|onnx"
    rb"|flex|attention.bias|varlen|sparse|nested|library|debug|composable|prims|dispatch|flop_counter|while_loop"
    rb"|\b(cond|fx|func|jit|ao|hub)\b"
)
# torch._dynamo reads such variables when it is imported. A program that names one sets it before its first optimizer.
_SETS_DYNAMO = re.compile(rb"\b(?:TORCHDYNAMO|TORCHINDUCTOR|TORCH_COMPILE|TORCH_DYNAMO)_[A-Z]")
# Reading more would itself delay the start.
_FILES_MAX = 50
_BYTES_MAX = 200_000

_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n;]*)|import[ \t]+([^\n;]*))",
    re.MULTILINE,
)
_COMMENT = re.compile(rb"#[^\n]*")
# Some packages read such variables when they are imported. A program that names one may set it before.
_SETS = re.compile(rb"\b(?:ACCELERATE|DATASETS|HF|HUGGING_?FACE|HYDRA|LIGHTNING|PL|TRANSFORMERS|USE)_[A-Z]|dotenv")


def program_text(kind: ProgramKind, target: str) -> ProgramText:
    """What the source of the program, and of the modules beside it that it imports, shows."""
    try:
        files, root = _program_files(kind, target)
        if not files or os.environ.get("PYTHONSAFEPATH"):
            # An installed module, or a program whose folder is not in `sys.path`.
            return ProgramText()
        text = files[0].read_bytes() if kind is ProgramKind.SCRIPT and files[0].is_file() else b""
        if text and b"\0" not in text and not is_python(text):
            return ProgramText(is_refused=True)
        return _read(files, root)
    except (OSError, ValueError, RecursionError, MemoryError):
        return ProgramText()


def is_python(text: bytes) -> bool:
    """Whether Python can parse `text`, or it is an archive of `zipapp`."""
    with warnings.catch_warnings():
        # Python reports these when it runs the program.
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            # An archive of `zipapp` may begin with a shebang line.
            return b"PK\x03\x04" in text
    return True


def _program_files(kind: ProgramKind, target: str) -> tuple[list[Path], Path]:
    """The files that run first, and the folder of the modules beside the program."""
    if kind is ProgramKind.MODULE:
        root = Path.cwd()
        return [*_files(root, target), *_files(root, f"{target}.__main__")], root
    script = Path(os.path.realpath(target))
    return ([script / "__main__.py"], script) if script.is_dir() else ([script], script.parent)


def _read(files: list[Path], root: Path) -> ProgramText:
    """What these files, and those beside them that they import, show."""
    is_clear = True
    packages: dict[str, None] = {}
    texts: dict[Path, bytes] = {}
    size, files = 0, [*files]
    while files and len(texts) < _FILES_MAX and size < _BYTES_MAX:
        file = files.pop(0)
        if file in texts:
            continue
        if not file.is_file():
            # A pipe can be read only once, and the program needs it.
            return ProgramText()
        texts[file] = text = _COMMENT.sub(b"", file.read_bytes())
        size += len(text)
        for module, names in _imported(text, file, root):
            own = [each for name in (module, *(f"{module}.{name}" for name in names)) for each in _files(root, name)]
            files += own
            first = module.partition(".")[0]
            if not own and first in PACKAGES:
                packages |= dict.fromkeys([f"{module}:{name}" for name in names] or [module])
            is_known = first in _KNOWN or (first in sys.stdlib_module_names and first not in _HIDING_MODULES)
            is_clear = is_clear and (bool(own) or is_known)
    whole = b"\n".join(texts.values())
    unused: tuple[str, ...] = _WITHOUT_DYNAMO if _SETS_DYNAMO.search(whole) else ()
    is_clear = is_clear and not files and size < _BYTES_MAX and b"\0" not in whole and not _HIDING.search(whole)
    if is_clear and not (b"torch" in whole and _USES_DYNAMO.search(whole)):
        unused = _WITHOUT_DYNAMO if b"torch" in whole else DEFAULT_PRELOAD
    return ProgramText(unused, packages=() if _SETS.search(whole) else tuple(packages))


def _imported(text: bytes, file: Path, root: Path) -> Iterator[tuple[str, list[str]]]:
    """The modules that a text imports, and the names that it imports from each."""
    package = file.parent.relative_to(root).parts
    for dots, base, names, modules in _IMPORT.findall(text.replace(b"\\\n", b" ")):
        items = [item.split() for item in (names or modules).strip(b"() \t\r").split(b",")]
        found = [item[0].decode() for item in items if item and item[0].isascii()]
        if modules:
            yield from ((word, []) for word in found)
        else:
            above = package[: len(package) + 1 - len(dots)] if dots else ()
            yield ".".join((*above, *filter(None, [base.decode()]))), [word for word in found if word.isidentifier()]


def _files(root: Path, name: str) -> Iterator[Path]:
    """The files below `root` that an import of `name` runs, those of its packages too."""
    path = root
    for part in name.split("."):
        path = path / part
        for file in (path.with_name(f"{part}.py"), path / "__init__.py"):
            if part and file.is_file():
                yield file
