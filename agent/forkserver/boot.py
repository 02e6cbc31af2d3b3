"""What a fork server is told at its birth, and how one is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from elaunch.records import dataclass
from elaunch.rendezvous.codec import decode, encode
from elaunch.rendezvous.types import Program

BOOT_VARIABLE = "ELAUNCH_BOOT"
HOOK_DIR = str(Path(__file__).with_name("hook"))

# Without site: .pth files and customisations may do anything, and a process that only execs has no use for them.
_BARE = (
    "import sys; there = [p for p in sys.path if p]; sys.path = [*there, sys.argv[2]]; "
    "from elaunch.agent.forkserver.server import bare; sys.path = there; bare(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class Boot:
    """The agent's words to its fork server.

    `preload` is None for exec, and `fallback` then the reason, where that was not asked for. `pythonpath` is the user's
    PYTHONPATH. `ignored` are signals that workers ignore from their start. `mask` are the signals that were blocked
    when the agent started it, where it has begun anew since.
    """

    agent_pid: int
    control_fd: int
    program: Program
    preload: tuple[str, ...] | None
    pythonpath: str | None
    ignored: tuple[int, ...] = ()
    fallback: str = ""
    mask: tuple[int, ...] | None = None

    def memfd(self) -> int:
        """A new descriptor to `read` it from, in this process or one that inherits it."""
        fd = os.memfd_create("elaunch-boot", 0)
        os.write(fd, encode(self).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    @classmethod
    def read(cls, fd: int) -> Boot:
        """The words of `fd`, which is closed."""
        with open(fd) as file:
            return decode(cls, file.read())


def bare_command(boot_fd: int) -> list[str]:
    """The command line of a fork server that execs every worker."""
    return [sys.executable, "-S", "-c", _BARE, str(boot_fd), str(Path(__file__).parents[3])]


def pausing(environment: Mapping[str, str], boot_fd: int) -> dict[str, str]:
    """`environment`, with what makes an interpreter stop at our sitecustomize (see paused.py)."""
    path = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{path}" if path else HOOK_DIR,
        BOOT_VARIABLE: str(boot_fd),
    }
