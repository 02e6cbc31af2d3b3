"""A module in DDP with its buckets and its hook, in a group of one: the mean of all gradients is the own one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elaunch.trainer.ddp.options import HOOKS, DdpError, DdpOptions
from elaunch.trainer.ddp.powersgd import PowerSgd
from elaunch.trainer.ddp.wrapper import hook_state, wrap

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def gradients(model: nn.Module, steps: int = 4) -> torch.Tensor:
    for _ in range(steps):
        model.zero_grad()
        model(torch.linspace(-1, 1, 64).repeat(2, 1)).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize(
    ("hook", "tolerance"), [("none", 0.0), ("fp16", 1e-3), ("bf16", 1e-2), ("quantised", 2e-2), ("powersgd", 1e-5)]
)
def test_each_hook_gives_the_gradients_within_its_precision(hook: str, tolerance: float) -> None:
    # Both samples are equal, so each gradient is a matrix of rank 1.
    start = 2 if "powersgd" in hook else None
    exact = gradients(network())

    found = gradients(wrap(network(), DdpOptions(hook, powersgd_start=start, bucket_mb=0.02), CPU))

    assert float((found - exact).norm() / exact.norm()) <= tolerance
    assert torch.equal(found, exact) == (hook == "none")


@pytest.mark.parametrize("hook", HOOKS)
def test_only_powersgd_has_a_state_to_keep(hook: str) -> None:
    model = wrap(network(), DdpOptions(hook), CPU)

    assert isinstance(hook_state(model), PowerSgd) == (hook in ("powersgd", "batched-powersgd"))
    assert hook_state(model) is None or hook_state(model).start == 10
    assert hook_state(nn.Linear(1, 1)) is None


def sizes(**options: Any) -> list[int]:
    """Bytes of each bucket after DDP has made them anew. A layer has 16,640."""
    model = wrap(network(), DdpOptions(**options), CPU)
    gradients(model, 2)
    return [4 * bucket.buffer().numel() for bucket in model.reducer._get_zeros_like_grad_buckets()]


def test_the_sizes_of_buckets_are_those_that_were_asked_for() -> None:
    layer_mb = 16_640 / 2**20
    assert sizes() == [3 * 16_640]
    assert sizes(bucket_mb=layer_mb) == [16_640] * 3


@pytest.fixture
def module_of_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hooks_of_mine.py").write_text(
        "import torch\n"
        "def same(group, bucket):\n"
        "    future = torch.futures.Future()\n"
        "    future.set_result(bucket.buffer())\n"
        "    return future\n"
        "def three(group, other, bucket): ...\n"
        "number = 3\n"
        "class Counting:\n"
        "    def __init__(self, group): self.group, self.calls = group, 0\n"
        "    def __call__(self, bucket):\n"
        "        self.calls += 1\n"
        "        return same(self.group, bucket)\n"
        "    def state_dict(self): return {'calls': self.calls}\n"
        "    def load_state_dict(self, state): self.calls = state['calls']\n"
        "class Forgetful(Counting):\n"
        "    state_dict = property()\n"
        "class Silent:\n"
        "    def __init__(self, group): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hooks_of_mine", raising=False)
    return "hooks_of_mine"


def test_a_function_of_the_users_own_is_called_with_each_bucket(module_of_hooks: str) -> None:
    model = wrap(network(), DdpOptions(f"{module_of_hooks}:same"), CPU)

    assert torch.equal(gradients(model), gradients(network()))
    assert hook_state(model) is None


def test_an_object_of_the_users_own_class_is_the_state_that_is_kept(module_of_hooks: str) -> None:
    model = wrap(network(), DdpOptions(f"{module_of_hooks}:Counting"), CPU)

    assert torch.equal(gradients(model, steps=3), gradients(network()))
    assert hook_state(model).state_dict() == {"calls": 3}
    assert hook_state(model).group is model.process_group


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:hook", "no_such_module cannot be imported .*; put its folder on PYTHONPATH"),
        ("hooks_of_mine:missing", r"has no function missing\(process_group, bucket\), and no class missing"),
        ("hooks_of_mine:number", "has no function number"),
        ("hooks_of_mine:three", "has no function three"),
        ("hooks_of_mine:Forgetful", r"has no state_dict\(\) and load_state_dict\(\), so a restart would begin its"),
        ("hooks_of_mine:Silent", r"cannot be called; give it __call__\(self, bucket\)"),
    ],
)
def test_what_is_no_hook_is_refused_with_the_way_out(module_of_hooks: str, name: str, sentence: str) -> None:
    with pytest.raises(DdpError, match=sentence):
        wrap(network(), DdpOptions(name), CPU)
