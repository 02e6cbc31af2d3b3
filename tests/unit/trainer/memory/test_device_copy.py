"""Copies from a GPU, with a device whose work is done when an event is waited for: not before, and never by itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.trainer.memory.device_copy import GpuCopies, PinnedBuffers
from elaunch.trainer.state.training_state import Training


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._count = stream, len(stream.done) + len(stream.work)

    def query(self) -> bool:
        return len(self._stream.done) >= self._count

    def synchronize(self) -> None:
        self._stream.run(self._count)


class Stream:
    """Work in order. A stuck stream never does any."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done: list[Callable[[], object]] = []
        self.is_stuck = False
        self.waits_for: list[Event] = []

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)

    def run(self, count: int) -> None:
        assert not self.is_stuck, "this would wait for ever"
        assert all(event.query() for event in self.waits_for), "a copy would begin before the commit is complete"
        while len(self.done) < count:
            self.done.append(self.work.pop(0))
            self.done[-1]()


class Cuda:
    """What GpuCopies takes from torch.cuda."""

    def __init__(self) -> None:
        self.main = self.present = Stream()
        self.side: Stream | None = None
        self.is_capturing = False
        self.bound: list[torch.device] = []

    def Stream(self, device: torch.device) -> Stream:
        self.side = Stream()
        return self.side

    def current_stream(self, device: torch.device) -> Stream:
        return self.present

    def set_device(self, device: torch.device) -> None:
        self.bound.append(device)

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.present = self.present, stream
        yield
        self.present = before

    def begin(self, target: Tensor, source: Tensor) -> None:
        self.present.work.append(lambda: target.copy_(source))


def bytes_of(size: int) -> Tensor:
    return torch.full((size,), 170, dtype=torch.uint8)


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


def copies(cuda: Cuda) -> GpuCopies:
    return GpuCopies(torch.device("cuda", 1), cuda, PinnedBuffers(64, bytes_of, cuda.begin))


class TestStaging:
    def test_everything_arrives_whatever_its_size(self, cuda: Cuda) -> None:
        sizes = [1, 3, 63, 64, 65, 200, 0, 1000]
        sources = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes] + [torch.tensor(2.5)]
        targets = [torch.zeros_like(source) for source in sources]

        PinnedBuffers(64, bytes_of, cuda.begin).copy(list(zip(targets, sources, strict=True)), cuda.main)

        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source)

    @pytest.mark.parametrize("source", [torch.ones(4, 4)[:, :2], torch.complex(torch.ones(3), torch.ones(3)).conj()])
    def test_what_lies_in_another_order_arrives_too(self, cuda: Cuda, source: Tensor) -> None:
        target = torch.zeros(source.shape, dtype=source.dtype)

        PinnedBuffers(64, bytes_of, cuda.begin).copy([(target, source)], cuda.main)

        assert torch.equal(target, source)


class TestGpuCopies:
    def test_the_state_is_read_beside_a_stuck_stream_once_the_commit_is_complete(self, cuda: Cuda) -> None:
        gpu = copies(cuda)
        parameter = torch.zeros(1000)
        cuda.main.work.append(lambda: parameter.fill_(7))
        gpu.after_commit()
        cuda.main.run(1)
        cuda.main.is_stuck = True
        cuda.main.work.append(lambda: parameter.fill_(8))
        assert cuda.side is not None

        with gpu.reading():
            # As GradScaler's `.item()`: it waits for the present stream.
            cuda.present.record_event().synchronize()
            pairs = [(target := torch.zeros(1000), parameter)]
            gpu._staging.copy(pairs, cuda.present)

        assert len(cuda.side.waits_for) == 1
        assert target.unique().tolist() == [7]
        assert cuda.present is cuda.main

    def test_a_commit_queries_the_groups_after_the_gradients_are_complete(self, cuda: Cuda) -> None:
        queried: list[bool] = []
        cuda.main.work.append(lambda: None)
        threading.Timer(0.05, lambda: cuda.main.run(1)).start()

        copies(cuda).before_commit(lambda: queried.append(bool(cuda.main.done)))

        assert queried[-1]

    def test_a_commit_that_waits_for_a_stuck_collective_ends_when_its_group_has_failed(self, cuda: Cuda) -> None:
        cuda.main.work.append(lambda: None)
        cuda.main.is_stuck = True

        def check() -> None:
            raise RuntimeError("TIMEOUT")

        with pytest.raises(RuntimeError, match="TIMEOUT"):
            copies(cuda).before_commit(check)

    def test_a_commit_within_a_capture_is_refused(self, cuda: Cuda) -> None:
        cuda.is_capturing = True

        with pytest.raises(RuntimeError, match=r"put graph\.replay\(\) into"):
            copies(cuda).before_commit(pytest.fail)


def test_a_model_on_several_gpus_is_refused() -> None:
    class Anywhere(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([_On("cuda:0"), _On("cuda:1")])

    with pytest.raises(ValueError, match="are on cuda:0 and cuda:1; a Keeper copies from one GPU"):
        Training(Anywhere(2, 2), SimpleNamespace(param_groups=[], state={}))


class _On:
    is_cuda = requires_grad = True

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
