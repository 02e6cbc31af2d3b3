"""The generators' states are the same object until somebody draws, seeds or replaces one."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from elaunch.trainer.state import rng_state
from elaunch.trainer.state.packing import pack
from elaunch.trainer.state.rng_state import RandomStates

CPU = torch.device("cpu")


def drawn() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), numpy.random.standard_normal(), float(torch.rand(1))


CHANGES: dict[str, Callable[[], object]] = {
    "python draws": random.random,
    "python draws a normal number": lambda: random.gauss(0, 1),
    "torch draws": lambda: torch.rand(1),
    "torch is seeded": lambda: torch.manual_seed(77),
    "numpy draws": numpy.random.random,
    "numpy draws a normal number": numpy.random.standard_normal,
    "numpy is seeded": lambda: numpy.random.seed(77),
    "numpy gets a state": lambda: numpy.random.set_state(numpy.random.RandomState(78).get_state()),
    "numpy gets another generator": lambda: numpy.random.set_bit_generator(numpy.random.MT19937(79)),
    "numpy gets a generator of another kind": lambda: numpy.random.set_bit_generator(numpy.random.PCG64(80)),
}


@pytest.fixture(autouse=True)
def generators() -> object:
    generator = numpy.random.get_bit_generator()
    random.seed(0), torch.manual_seed(0), numpy.random.seed(0)
    yield
    numpy.random.set_bit_generator(generator)


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_seen(what: str) -> None:
    states = RandomStates(CPU)
    before = states.capture()
    CHANGES[what]()
    after = states.capture()
    assert after is not before
    assert states.capture() is after


def test_a_normal_number_that_numpy_has_in_store_is_part_of_its_state() -> None:
    states = RandomStates(CPU)
    # The first call makes two.
    numpy.random.standard_normal()
    before = states.capture()
    numpy.random.standard_normal()
    assert states.capture() is not before


@pytest.mark.parametrize("what", CHANGES)
def test_a_state_that_is_applied_draws_the_same_again(what: str) -> None:
    states = RandomStates(CPU)
    CHANGES[what]()
    state = states.capture()
    pack(state)

    first = drawn()
    rng_state.apply(state, CPU)
    assert drawn() == first


@pytest.mark.parametrize("what", ["all draw", *list(CHANGES)[:-1]])
@pytest.mark.parametrize("before", [random.random, drawn])
def test_what_is_drawn_aside_changes_no_state(what: str, before: Callable[[], object]) -> None:
    states = RandomStates(CPU)
    before()
    state = states.capture()
    first = drawn()

    rng_state.apply(state, CPU)
    for _ in range(2):
        state = states.capture()
        states.step_aside(state, 3)
        aside = drawn() if what == "all draw" else CHANGES[what]()
        states.apply(state)

    assert drawn() == first != aside
