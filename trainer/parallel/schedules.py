"""Arguments of torch's pipeline schedules that older versions of torch do not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def known(call: Callable[..., Any], **arguments: object) -> dict[str, Any]:
    """Those of `arguments` that this torch's `call` has.

    Without `scale_grads` a schedule never scales gradients. Without `return_outputs` it always keeps the outputs.
    """
    return {name: value for name, value in arguments.items() if name in inspect.signature(call).parameters}
