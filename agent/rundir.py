"""Where a run keeps files: a private folder that is removed at the end, or the user's log folder, which is kept."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path


def private_places() -> tuple[str, ...]:
    """Where a run's private folder may be made, the user's choice of a temporary folder first; nothing is made yet."""
    name = f"elaunch_{secrets.token_hex(8)}"
    chosen = (os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    # Absolute: the guardian, which removes them, works elsewhere.
    return tuple(str(Path(folder, name).absolute()) for folder in (*chosen, "/tmp", "/var/tmp", "/dev/shm") if folder)


class RunDir:
    """Folders of one run, one per generation and rank: `attempt_<generation>/<rank>/` (torchrun's tree).

    No generation reuses another's, so no restart deletes or overwrites a file. What cannot be made is gone without,
    but for the log folder itself.
    """

    def __init__(
        self, log_dir: Path | None, run_id: str, warn: Callable[[str], None], private: tuple[str, ...] = ()
    ) -> None:
        """`private` are the places for a private folder, the first that works; fresh `private_places` without.

        Raises OSError where `log_dir` can hold nothing: who asks for files should not learn at the end that none are.
        """
        self._warn = warn
        self._private_places = private or private_places()
        self._warned = False
        self.logs: Path | None = None
        self.private: Path | None = None
        if log_dir:
            logs = log_dir / f"{run_id.replace('/', '_')}_{secrets.token_hex(4)}"
            logs.mkdir(parents=True)
            self.logs = logs.absolute()
        else:
            self.private = self._private()

    @property
    def is_incomplete(self) -> bool:
        """Whether something could not be written that belongs here."""
        return self._warned

    @property
    def root(self) -> Path | None:
        return self.logs or self.private

    def generation(self, generation: int) -> Path | None:
        """The generation's folder."""
        return self._make(self.root / f"attempt_{generation}") if self.root else None

    def rank(self, generation: int, rank: int) -> Path | None:
        """The folder of one rank in one generation."""
        return self._make(self.root / f"attempt_{generation}" / str(rank)) if self.root else None

    def forget_before(self, generation: int) -> None:
        """Remove the private folders of older generations; a log folder keeps all of its own."""
        if self.private:
            for folder in self.private.glob("attempt_*"):
                if folder.name != f"attempt_{generation}":
                    shutil.rmtree(folder, ignore_errors=True)

    def warn(self, trouble: str) -> None:
        """Say what cannot be written; once, since a full disk has the same for every stream of every rank."""
        if not self._warned:
            self._warned = True
            self._warn(f"{trouble}; more of the kind is not said again")

    def _make(self, path: Path) -> Path | None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.warn(f"{path} cannot be made ({error.strerror}); going on without it")
            return None
        return path.absolute()

    def _private(self) -> Path | None:
        for place in self._private_places:
            try:
                # The name is nobody's to guess; where it exists all the same, it is not ours.
                os.mkdir(place, 0o700)  # noqa: PTH102
            except OSError:
                continue
            return Path(place).absolute()
        self.warn("no temporary folder can be written; exceptions are read from the workers' output instead")
        return None
