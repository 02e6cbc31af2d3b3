"""Several models, optimizers and Keepers in one program or job, compiled models, and a commit that does not end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from elaunch.trainer.keeper import entry_checks
from elaunch.trainer.keeper.keeper import Keeper
from tests.harness import DEADLINE_S
from tests.unit.trainer.conftest import Fails, trained

pytestmark = pytest.mark.usefixtures("memory")


def keeper_of(model: Any, optimizer: Any = None, **options: Any) -> Keeper:
    models = model if isinstance(model, list) else [model]
    own = torch.optim.SGD([p for one in models for p in one.parameters()], lr=0.1, momentum=0.9)
    return Keeper(model, optimizer or own, **{"lose_at_most": 1, "per_rank": (), "log": lambda _: None, **options})


def test_a_second_keeper_of_a_name_that_is_entered_is_refused() -> None:
    first, second, third = keeper_of(nn.Linear(2, 2)), keeper_of(nn.Linear(2, 2)), keeper_of(nn.Linear(2, 2), name="b")

    with first, third, pytest.raises(ValueError, match=r"a Keeper named 'training' is entered already.*own name="):
        second.__enter__()


def test_a_second_training_of_a_program_has_a_name_and_checkpoints_of_its_own(tmp_path: Path) -> None:
    """It would go on from the first one's last step."""
    with keeper_of(nn.Linear(2, 2), checkpoints=tmp_path / "all"):
        pass

    with pytest.raises(ValueError, match=r"a Keeper named 'training' has ended in this program.*its own name="):
        keeper_of(nn.Linear(2, 2)).__enter__()
    with pytest.raises(ValueError, match=r"a Keeper with checkpoints='.*all' has ended.* and checkpoints="):
        keeper_of(nn.Linear(2, 2), name="b", checkpoints=tmp_path / "all").__enter__()
    with keeper_of(nn.Linear(2, 2), name="fine-tuning") as keeper:
        assert keeper.step == 0


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "fsdp2"])
def test_a_checkpoint_of_another_optimizer_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sharded: bool
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")

    def train(kind: Any, *, groups: int = 1, **options: Any) -> None:
        model = nn.Linear(2, 2)
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        parameters = [*model.parameters()]
        optimizer = kind([{"params": parameters[n::groups]} for n in range(groups)], lr=0.1)
        entry_checks._held.cache_clear()
        trained(model, optimizer, 1, lambda: model(torch.ones(1, 2)).sum(), checkpoints=tmp_path / "c", **options)

    adamw = torch.optim.AdamW
    train(adamw)
    train(adamw)

    for other in (torch.optim.SGD, torch.optim.Adam):
        with pytest.raises(ValueError, match=rf"1\.\w+ has the state of AdamW.* this program has {other.__name__}"):
            train(other)
    with pytest.raises(ValueError, match="the checkpoint has 0 of `scheduler`, and this program 1"):
        train(adamw, scheduler=torch.optim.lr_scheduler.StepLR(adamw([nn.Parameter(torch.ones(1))]), 1))
    if not is_sharded:
        with pytest.raises(ValueError, match=r"AdamW with 2 parameters, .* AdamW with 1 \+ 1 parameters"):
            train(adamw, groups=2)


def test_groups_that_a_restarted_program_lacks_are_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    trained(model, optimizer, 1)
    entry_checks._held.cache_clear()

    with pytest.raises(ValueError, match=r"SGD has groups of 1 parameters, and this program has groups of 2;"):
        keeper_of(model, torch.optim.SGD(model.parameters(), lr=0.1)).__enter__()


def test_the_same_training_may_be_tried_again_after_an_error() -> None:
    def fail() -> None:
        with keeper_of(nn.Linear(2, 2)) as keeper:
            for _ in keeper.steps(2):
                with keeper.commit():
                    pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    with keeper_of(nn.Linear(2, 2)) as keeper:
        assert keeper.step == 2


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_layers(model: nn.Module) -> nn.Module:
    return nn.Sequential(*map(compiled, model.children()))


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def run(form: Callable[[nn.Module], nn.Module], steps: int, fails_in: int = 0) -> tuple[int, list[torch.Tensor]]:
    """Train with random numbers in the forward pass. Returns the first step's number and the state at the end."""
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = form(plain)
    keeper = keeper_of(model)
    with keeper:
        began = keeper.step
        for step in keeper.steps(steps):
            # The first call compiles.
            model(torch.randn(8, 4)).square().sum().backward()
            if step == fails_in:
                raise RuntimeError("Connection reset by peer")
            with keeper.commit():
                for parameter in plain.parameters():
                    parameter.data = parameter.data - 0.01 * parameter.grad  # type: ignore[operator]
                    parameter.grad = None
    return began, [value.clone() for value in (*plain.state_dict().values(), torch.get_rng_state())]


@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.parametrize("form", [compiled, compiled_layers, compiled_in_place])
def test_a_compiled_model_continues_to_the_bit(
    form: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch, memory: Path, fails: Fails
) -> None:
    monkeypatch.delenv("ELAUNCH_MEMORY")
    _, calm = run(form, 5)
    monkeypatch.setenv("ELAUNCH_MEMORY", str(memory))

    fails(lambda: run(form, 5, fails_in=4))
    began, resumed = run(form, 5)

    assert began == 3
    assert all(map(torch.equal, calm, resumed))


def test_zero_beside_another_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not at the top: it imports for 0.3 s, and gives hundreds of warnings to every process that collects this file.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 2)
    zero = object.__new__(ZeroRedundancyOptimizer)

    with pytest.raises(
        ValueError, match="2 optimizers, one of them a ZeroRedundancyOptimizer, cannot be kept together"
    ):
        keeper_of(model, [torch.optim.SGD(model.parameters()), zero])


def test_fsdp1_cannot_be_compared_and_is_refused(group: None) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)

    with pytest.raises(ValueError, match="verify_every is 5, and FullyShardedDataParallel does not show which part"):
        keeper_of(model, verify_every=5).__enter__()


def test_a_rescue_does_not_wait_for_a_commit_that_waits_for_a_dead_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    keeper = keeper_of(model)
    took_s: list[float] = []

    def rescue() -> None:
        # As the link's thread does while the training's thread is in a collective.
        begun_s = time.monotonic()
        keeper._state.peer_failed(1)
        took_s.append(time.monotonic() - begun_s)

    with contextlib.suppress(ConnectionResetError), keeper:
        for step in keeper.steps(9):
            with keeper.commit():
                if step == 3:
                    thread = threading.Thread(target=rescue, daemon=True)
                    thread.start()
                    thread.join(DEADLINE_S)
                    raise ConnectionResetError

    assert took_s
    assert took_s[0] > 1

    monkeypatch.setenv("ELAUNCH_GENERATION", "1")
    with keeper_of(model) as resumed:
        assert resumed.step == 2


class Server:
    """A parameter server's training, alone in its Keeper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, generation: int = 0) -> None:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "ELAUNCH_GENERATION": generation}
        for name, number in places.items():
            monkeypatch.setenv(name, str(number))
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 100.0 * rank)
        self.logged: list[str] = []
        self.keeper = keeper_of(self.model, log=self.logged.append, name="server")

    def train(self, steps: int, fails_in: int = 0) -> float:
        with self.keeper:
            for step in self.keeper.steps(steps):
                if step == fails_in:
                    raise RuntimeError("Connection reset by peer")
                with self.keeper.commit(), torch.no_grad():
                    self.model.weight += 1
        return self.model.weight.item()


def test_two_processes_of_a_node_that_are_alone_keep_their_states_apart(
    monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    for rank, fails_in in ((0, 3), (1, 5)):
        with pytest.raises(RuntimeError, match="reset by peer"):
            Server(monkeypatch, rank).train(8, fails_in)

    # Processes of their own: a program has no two Keepers of one name.
    assert [Server(monkeypatch, rank, generation=1 + rank).train(8) for rank in (0, 1)] == [8, 108]
    assert {path.name.partition(".")[0] for path in memory.iterdir()} == {"server-0", "server-1"}


def test_workers_without_a_process_group_are_refused_since_each_would_train_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")

    with pytest.raises(
        ValueError, match=r"2 workers, and this one has no process group: .*init_process_group\(\) befo"
    ):
        keeper_of(nn.Linear(1, 1)).__enter__()
