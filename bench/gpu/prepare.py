"""The first half of `make gpu`, by any Python that has torch: finds a GPU, makes `.venv-gpu`, and goes on in it.

Nothing but the standard library is there yet. The environment uses the torch that is installed: pip installs no other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-gpu"
# What the tests and benches need beside elaunch's own requirements.
EXTRA = ("pytest>=9", "pytest-xdist>=3", "numpy", "nvidia-ml-py>=12")
# Devices of NVIDIA's driver, of Windows' subsystem for Linux, and of AMD's driver.
DEVICES = ("dev/nvidia[0-9]*", "dev/dxg", "dev/kfd")
_QUERY_TORCH = """
import importlib.metadata, json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "built_for": torch.version.cuda or torch.version.hip or "",
    "gpus": torch.cuda.device_count() if cuda else 0, "distribution": importlib.metadata.version("torch")}))
"""


class NotHere(Exception):
    """This machine cannot run it: one sentence."""


def main() -> NoReturn:
    """Ends with the exit code 2 and a sentence, or becomes `python -m bench.gpu`."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="make gpu")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, for a machine without a network")
    options, more = parser.parse_known_args()
    try:
        require_device(Path("/"))
        found = query_torch(sys.executable)
        require_torch(found)
        python = install(found, options.wheels)
    except NotHere as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    os.chdir(ROOT)
    os.execv(python, [python, "-m", "bench.gpu", "--began-s", str(began_s), *more])


def require_device(root: Path) -> None:
    """Raise NotHere where no driver shows a GPU. No torch is needed for that."""
    if not any(True for pattern in DEVICES for _ in root.glob(pattern)):
        raise NotHere("make gpu needs a GPU, and this machine shows none (there is no /dev/nvidia0); nothing was run")


def query_torch(python: str) -> Mapping[str, object]:
    """What torch reports in that interpreter; empty if it cannot be imported."""
    done = subprocess.run([python, "-c", _QUERY_TORCH], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}


def require_torch(found: Mapping[str, object]) -> None:
    """Raise NotHere where the torch that is installed does not see the GPU."""
    if not found:
        raise NotHere(
            f"make gpu needs a Python with torch, and {sys.executable} cannot import it; "
            "name another with make gpu PYTHON=…"
        )
    if not found["gpus"]:
        why = f"is built for {found['built_for']}" if found["built_for"] else "is a build for CPUs"
        raise NotHere(f"torch {found['torch']} in {sys.executable} sees no GPU (it {why}); nothing was run")


def install(found: Mapping[str, object], wheels: Path | None) -> str:
    """Make the environment, or take the one that is there. Returns its interpreter. Raises NotHere.

    `found` is what `query_torch` returned for this interpreter. pip knows the version of the wheel, which may lack the
    build's suffix: torch 2.13.0+cu130 is 2.13.0 to pip.
    """
    torch = found["torch"]
    python = ENVIRONMENT / "bin" / "python"
    mark = ENVIRONMENT / ".installed"
    wanted = f"{torch} {(ROOT / 'pyproject.toml').stat().st_mtime_ns}"
    if mark.is_file() and mark.read_text() == wanted:
        return str(python)
    print(f"make gpu: installing what the tests need into {ENVIRONMENT}", file=sys.stderr, flush=True)
    _run("venv", sys.executable, "-m", "venv", "--system-site-packages", str(ENVIRONMENT))
    if sys.prefix != sys.base_prefix:
        # This interpreter is in an environment itself, which the new one would not see.
        folder = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        Path(folder, "present.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pin = ENVIRONMENT / "torch.txt"
    pin.write_text(f"torch=={found['distribution']}\n")
    offline = ("--no-index", "--find-links", str(wheels.resolve())) if wheels else ()
    # The constraint keeps pip from replacing the installed torch.
    pip = (str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pin), *offline)
    _run("pip", *pip, "--editable", str(ROOT), *EXTRA)
    if query_torch(str(python)).get("torch") != torch:
        raise NotHere(f"{ENVIRONMENT} does not have torch {torch}; remove it, and try again")
    torchrun = python.with_name("torchrun")
    if not torchrun.exists():
        # Its command is where torch is; the bench finds it beside elaunch's.
        torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
        torchrun.chmod(0o755)
    mark.write_text(wanted)
    return str(python)


def _run(what: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
        hint = "; without a network give WHEELS=DIR, a folder with the wheels (docs/gpu.md)" if what == "pip" else ""
        raise NotHere(f"{what} failed: {last[0][:300]}{hint}")


if __name__ == "__main__":
    main()
