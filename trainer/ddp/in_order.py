"""Runs a hook for one bucket after the other, so that its collectives come in the same order on all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class InOrder:
    """A hook whose bucket begins when the bucket before it is done. `hook` is what DDP is to call.

    The backward pass goes on meanwhile; only the exchanges of a step's buckets do not overlap each other.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._before: torch.futures.Future[torch.Tensor] | None = None

        # DDP asks for a function, and for a parameter of this name without another annotation.
        def in_order(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._begin(state, bucket)

        in_order.__qualname__ = getattr(hook, "__qualname__", type(hook).__name__)
        self.hook = in_order

    def _begin(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # The first bucket of a step follows nothing: an earlier backward pass may have failed halfway.
        before = None if bucket.index() == 0 else self._before
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._before = result

        def run(previous: torch.futures.Future[torch.Tensor] | None = None) -> None:
            # An exception in a callback would be printed and lost, and the backward pass would wait forever.
            try:
                if previous is not None:
                    previous.value()
                self._hook(state, bucket).add_done_callback(finish)
            except Exception as error:
                result.set_exception(error)

        def finish(done: torch.futures.Future[torch.Tensor]) -> None:
            try:
                value = done.value()
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        if before is None:
            run()
        else:
            before.add_done_callback(run)
        return result
