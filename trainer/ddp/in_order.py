"""Runs a hook for one bucket after the other, so that its collectives come in the same order on all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]


class InOrder:
    """A hook whose bucket begins when the bucket before it is done. `hook` is what DDP is to call.

    The backward pass goes on meanwhile; only the exchanges of a step's buckets do not overlap each other.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._before: torch.futures.Future[torch.Tensor] | None = None

        # DDP asks for a function, and for a parameter of this name without another annotation.
        def in_order(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._begin(state, bucket)

        in_order.__qualname__ = getattr(hook, "__qualname__", type(hook).__name__)
        self.hook = in_order

    def _begin(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # The first bucket of a step follows nothing: an earlier backward pass may have failed halfway.
        before = None if bucket.index() == 0 else self._before
        ended: torch.futures.Future[None] = torch.futures.Future()
        exchanges: list[torch.futures.Future[torch.Tensor]] = []
        errors: list[Exception] = []

        def run(previous: torch.futures.Future[torch.Tensor] | None = None) -> None:
            # An exception in this callback would be printed and lost, and the backward pass would wait forever.
            try:
                if previous is not None:
                    previous.value()
                exchanges.append(self._hook(state, bucket))
                exchanges[0].add_done_callback(lambda _: ended.set_result(None))
            except Exception as error:
                errors.append(error)
                ended.set_result(None)

        def result(_: torch.futures.Future[None]) -> torch.Tensor:
            if errors:
                raise errors[0]
            return exchanges[0].value()

        # What `then` raises reaches the backward pass with its words. An exception that is set on a future does not.
        self._before = ended.then(result)
        if before is None:
            run()
        else:
            before.add_done_callback(run)
        return self._before
