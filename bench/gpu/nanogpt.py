"""nanoGPT's own loop on the same text: the folder that it runs in, and its command. Its files are the user's.

nanoGPT is no package: `git clone https://github.com/karpathy/nanoGPT`, then `make gpu NANOGPT=DIR`.
"""

from __future__ import annotations

import array
import pickle
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FILES = ("train.py", "model.py", "configurator.py")
TEXT_BYTES = 8 << 20
_DATA = "bytes"


def trouble(folder: Path) -> str:
    """Why this is no nanoGPT; empty if it is one."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    return f"{folder} has no {', '.join(missing)}; give the folder of nanoGPT's train.py" if missing else ""


def prepare(folder: Path, nanogpt: Path, vocabulary: int) -> None:
    """Make the folder to run it in: the text of Python's library as tokens, a byte each, and nanoGPT's configurator."""
    data = folder / "data" / _DATA
    data.mkdir(parents=True, exist_ok=True)
    text = b"".join(_library())
    held_out = len(text) // 20
    for name, part in (("train.bin", text[:-held_out]), ("val.bin", text[-held_out:])):
        tokens = array.array("H")
        tokens.extend(part)
        (data / name).write_bytes(tokens.tobytes())
    # nanoGPT takes the size of its vocabulary from here.
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))
    link = folder / "configurator.py"
    if not link.exists():
        link.symlink_to((nanogpt / "configurator.py").resolve())


def command(nanogpt: Path, *, windows: int, accumulated: int, steps: int) -> list[str]:
    """Run it with the shape of the 124M GPT, bfloat16 and torch.compile, as its own defaults are.

    Its linear layers and norms get biases, as GPT-2 and the bundled trainer's model have them. By default it has none.
    """
    options = {
        "bias": True,
        "dataset": _DATA,
        "batch_size": windows,
        "gradient_accumulation_steps": accumulated,
        "max_iters": steps,
        "eval_iters": 1,
        "eval_interval": 1_000_000,
        "log_interval": 1,
        "out_dir": "out",
    }
    return [sys.executable, "-u", str(nanogpt.resolve() / "train.py"), *(f"--{k}={v}" for k, v in options.items())]


def _library() -> Iterator[bytes]:
    left = TEXT_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content = path.read_bytes()[:left]
        left -= len(content)
        yield content
        if left <= 0:
            return
