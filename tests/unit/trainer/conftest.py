"""What tests of the trainer in one process share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from elaunch.trainer import link
from elaunch.trainer.keeper import entry_checks
from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.state.tree import several

Fails = Callable[[Callable[[], object]], None]


def fail() -> None:
    raise RuntimeError("Connection reset by peer")


def trained(model: Any, optimizer: Any, steps: int, loss: Callable[[], Tensor] | None = None, **options: Any) -> Keeper:
    """A Keeper after a training of so many steps, each with a backward pass from `loss` if that is given."""
    keeper = Keeper(model, optimizer, **{"lose_at_most": 1, "per_rank": (), "log": lambda _: None, **options})
    with keeper:
        for _ in keeper.steps(steps):
            if loss is not None:
                loss().backward()  # type: ignore[no-untyped-call]
            with keeper.commit():
                for one in several(optimizer):
                    one.step()
                    one.zero_grad()
    return keeper


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's memory on this node. The training has no link."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("ELAUNCH_MEMORY", str(folder))
    monkeypatch.delenv("ELAUNCH_LINK", raising=False)
    monkeypatch.setenv("ELAUNCH_GENERATION", "0")
    link._open_link.cache_clear()
    # What other tests have left is no part of this program: the Keeper does not search it.
    entry_checks._held.cache_clear()
    gc.collect()
    gc.freeze()
    return folder


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run a training that ends as when a peer dies, and begin the next generation."""

    def run(training: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError, match="reset by peer"):
            training()
        monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    return run


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that the program's own handler of SIGTERM has got. All handlers are put back at the end."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


_GROUPS: list[object] = []


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    # Dropped by the next test: if gloo's own thread were the last to have the group, it would wait for its own end, and
    # abort the process (std::system_error: Resource deadlock avoided).
    _GROUPS[:] = [dist.group.WORLD]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
