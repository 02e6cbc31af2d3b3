"""Types and memory formats of tensors: what is kept comes back bit for bit, and the rest is refused at entry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from elaunch.trainer.keeper.keeper import Keeper
from elaunch.trainer.memory.device_copy import HostCopies
from elaunch.trainer.ranks.group_status import BrokenGroup, GroupStatus
from elaunch.trainer.state import model_state
from tests.unit.trainer.conftest import trained

# tests/e2e/test_accelerator.py runs these tests on a GPU, if there is one.
DEVICE = os.environ.get("ELAUNCH_TEST_DEVICE", "cpu")


pytestmark = pytest.mark.usefixtures("memory")


def bits(tensor: Tensor) -> bytes:
    """The bytes in memory, in the order of the indices."""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


class Momentum(torch.optim.Optimizer):
    """Keeps a value of type `dtype` per parameter, which need not be the parameter's type."""

    def __init__(self, parameters: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters, {"dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.rand_like(parameter, dtype=torch.float32).to(group["dtype"])
                    state["old"] = [state["mean"].float().sum()]
                parameter.add_(state["mean"].to(parameter.dtype), alpha=0.5)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("where", ["memory", "checkpoint"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_of_every_type_comes_back_bit_for_bit(
    dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made() -> tuple[nn.Linear, Momentum, dict[str, Any]]:
        torch.manual_seed(3)
        # The optimizer's values are of another type than the parameters, which torch changes when it loads them.
        model = nn.Linear(5, 3, device=DEVICE)
        return model, Momentum(model.parameters(), dtype), {}

    model, optimizer, extra = made()
    # All bytes there are, with those of NaNs.
    extra["all"] = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(dtype.itemsize).view(dtype)
    folder = {"checkpoints": tmp_path / "c"} if where == "checkpoint" else {}
    trained(model, optimizer, 2, extra=extra, **folder)

    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    if folder:
        monkeypatch.delenv("ELAUNCH_MEMORY")
    again, restored, kept = made()
    trained(again, restored, 2, extra=kept, **folder)

    assert kept["all"].dtype == dtype
    assert bits(kept["all"]) == bits(extra["all"])
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert bits(one) == bits(other)
        mean = restored.state[other]["mean"]
        assert mean.dtype == dtype
        assert bits(mean) == bits(optimizer.state[one]["mean"])


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, *([{"capturable": True}] if DEVICE == "cuda" else [])], ids=str
)
def test_channels_last_stays_in_model_and_optimizer(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(DEVICE)
        model = layers.to(memory_format=torch.channels_last, dtype=torch.bfloat16)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), **options)

    inputs = torch.ones(2, 3, 8, 8, dtype=torch.bfloat16, device=DEVICE).to(memory_format=torch.channels_last)
    model, optimizer = made()
    trained(model, optimizer, 2, lambda: model(inputs).sum())
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    again, restored = made()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    trained(again, restored, 2)

    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert bits(one) == bits(other)
        for name in ("exp_avg", "exp_avg_sq"):
            there, here = optimizer.state[one][name], restored.state[other][name]
            assert bits(there) == bits(here)
            assert there.stride() == here.stride() == one.stride()
    assert any(not parameter.is_contiguous() for parameter in again.parameters())


def test_the_restored_optimizer_shares_no_memory_with_the_copy(monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    model = nn.Linear(5, 3, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 1, lambda: model(torch.ones(1, 5, device=DEVICE)).sum())
    kept = bits(optimizer.state[model.weight]["exp_avg"])
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    keeper = Keeper(model, torch.optim.AdamW(model.parameters()), per_rank=(), lose_at_most=1, log=lambda _: None)
    with keeper:
        restored = keeper._training.optimizers[0].state[model.weight]
        for path in memory.glob("training.state-*"):
            path.write_bytes(bytes(path.stat().st_size))

        assert bits(restored["exp_avg"]) == kept
        assert restored["step"].item() == 1


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (TwoTensor(torch.ones(2), torch.ones(2)), r"two_tensor\.TwoTensor cannot be kept, since it is made of other"),
        (torch.ones(2, device="meta"), "materialize it first"),
        (torch.ones(2).to_sparse(), "use dense ones"),
        (torch.ones(2, 2).to_sparse_csr(), "layout torch.sparse_csr .*use dense ones"),
    ],
    ids=["subclass", "meta", "sparse", "csr"],
)
def test_what_cannot_be_kept_is_refused_by_name_at_entry(tensor: Tensor, why: str) -> None:
    model = nn.ParameterDict({"plain": torch.ones(2), "odd": nn.Parameter(tensor, requires_grad=False)})
    keeper = Keeper(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))

    with pytest.raises(TypeError, match=rf"^`odd` cannot be kept: .*{why}"), keeper:
        pytest.fail("it was entered")


NOT = "is not committed:"


class Recording(torch.optim.SGD):
    """Puts an object into its state in step 3."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        weight = self.param_groups[0]["params"][0]
        self.state[weight]["steps"] = steps = self.state[weight].get("steps", 0) + 1
        if steps == 3:
            self.state[weight]["path"] = Path("x")


class OwnState(torch.optim.SGD):
    """Has a state_dict of its own, which a snapshot calls and no commit."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"path": Path("x")} if self.state else {})}


@pytest.mark.parametrize(
    ("kind", "lose_at_most", "what"),
    [
        (Recording, 100, rf"step 3 {NOT} `optimizer\.state\.0\.path`"),
        (OwnState, 1, r"step \d is not \w+: `optimizer\.0\.path`"),
    ],
    ids=["commit", "snapshot"],
)
def test_the_commit_or_snapshot_that_finds_an_object_in_an_optimizers_state_is_refused_by_name(
    kind: type[torch.optim.SGD], lose_at_most: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    monkeypatch.setattr("elaunch.trainer.link.refuse", refused.append)
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)

    with pytest.raises(TypeError, match=rf"^{what} cannot be kept: .*Path") as caught:
        trained(model, optimizer, 9, lambda: model(torch.ones(1, 2)).sum(), lose_at_most=lose_at_most)

    assert refused == [str(caught.value)]


def test_a_dictionary_that_contains_itself_is_refused_at_entry() -> None:
    model, extra = nn.Linear(1, 1), dict[str, Any]()
    extra["parent"] = extra

    with pytest.raises(TypeError, match="contains itself"):
        trained(model, torch.optim.SGD(model.parameters()), 1, extra=extra)


def test_the_commit_that_makes_a_sparse_tensor_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    extra: dict[str, Any] = {}
    plain = nn.Linear(1, 1)
    keeper = Keeper(plain, torch.optim.SGD(plain.parameters()), extra=extra, lose_at_most=100)

    def count() -> None:
        for step in keeper.steps(5):
            with keeper.commit():
                extra["counts"] = torch.ones(2) if step < 4 else torch.ones(2).to_sparse()

    with pytest.raises(TypeError, match=rf"^step 1 {NOT} `weight: momentum_buffer of the optimizer` .*: a spars"):
        trained(model, optimizer, 3, lambda: model(torch.tensor([1])).sum(), name="momentum")
    with pytest.raises(TypeError, match=rf"^step 4 {NOT} `extra\.0\.counts` cannot be kept: a sparse tensor"), keeper:
        count()
    assert keeper.step == 3
    assert not capsys.readouterr().err, "of a copy of what cannot be kept"


def test_a_graph_that_may_hold_the_optimizers_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    assert not model_state.has_cuda_graphs()
    monkeypatch.setattr(model_state, "has_cuda_graphs", lambda: True)
    optimizer.param_groups[0]["capturable"] = True
    model_state.require_uncaptured(optimizer)
    optimizer.param_groups[0]["capturable"] = False
    optimizer.step()
    model_state.require_uncaptured(optimizer)
    optimizer.param_groups[0]["capturable"] = True

    with pytest.raises(ValueError, match=r"AdamW has capturable=True and a state, .*enter the Keeper first"):
        trained(model, optimizer, 1)


def test_a_step_whose_collective_has_failed_is_not_committed_and_the_one_before_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        with torch.no_grad():
            model.weight.fill_(len(steps))

    optimizer.step = step  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(GroupStatus, "error", lambda _: "NCCL reported an error" if len(steps) == 3 else "")
    # As on a GPU: gloo's collectives raise by themselves.
    monkeypatch.setattr(HostCopies, "before_commit", lambda _, look: look())
    with pytest.raises(BrokenGroup, match=r"^step 4 is not committed, since its gradients may be incomplete: NCCL"):
        trained(model, optimizer, 9, lose_at_most=1000)
    assert len(steps) == 3

    monkeypatch.setattr(GroupStatus, "error", lambda _: "")
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    again = nn.Linear(2, 2)
    keeper = trained(again, torch.optim.SGD(again.parameters()), 3)

    assert keeper.repeated == 0
    assert again.weight.unique().tolist() == [3]
