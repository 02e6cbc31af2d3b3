"""How small the difference between two steps of AdamW gets, and what it costs: python bench/scripts/delta.py.

A small GPT on bytes of Python's own library, in this process. Prints one line of JSON with medians: CPU seconds to copy
the state, to compute the difference and to compress it, and its size as a share of the state. "planes" is with the
bytes of equal weight side by side.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaunch.trainer.gpt.model import GPT

STEPS, SETTLED = 42, 30
WINDOWS, CONTEXT = 8, 64


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(layers=4, heads=4, width=256, context=CONTEXT, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    found: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begun_s = time.process_time()
        value = call(*arguments)
        found.setdefault(name, []).append(time.process_time() - begun_s)
        return value

    def state() -> Tensor:
        moments = [optimizer.state[each][key] for each in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        return torch.cat([each.detach().reshape(-1) for each in (*model.parameters(), *moments)]).view(torch.int32)

    before = target = torch.empty(0)
    for number in range(STEPS):
        starts = torch.randint(len(data) - CONTEXT - 1, (WINDOWS,)).tolist()
        windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        optimizer.zero_grad()
        model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous()).backward()
        optimizer.step()
        now = state()
        if number > SETTLED:
            timed("copy_s", target.copy_, now)
            difference = timed("difference_s", torch.bitwise_xor, before, now)
            content = difference.numpy().tobytes()
            small = timed("compress_s", zlib.compress, content, 1)
            planes = difference.view(torch.uint8).view(-1, 4).t().contiguous().numpy().tobytes()
            found.setdefault("size", []).append(len(small) / len(content))
            found.setdefault("size_planes", []).append(len(zlib.compress(planes, 1)) / len(planes))
            found.setdefault("unchanged", []).append(float((difference == 0).float().mean()))
        before, target = now, torch.zeros_like(now)
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    print(json.dumps({"state_mb": before.numel() * 4 / 1e6, "n": STEPS - SETTLED - 1, **medians}))


if __name__ == "__main__":
    main()
