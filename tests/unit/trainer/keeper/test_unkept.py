"""What a rehearsal records of a program's values."""

from __future__ import annotations

import random

import torch

from elaunch.trainer.keeper.unkept import digest, named


def test_a_generator_that_has_drawn_one_number_more_is_another_one() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(1, generator=generator)
    ((name, before),) = named("noise", generator)
    torch.randn(1, generator=generator)
    ((_, after),) = named("noise", generator)

    assert name == "generator `noise`"
    assert digest(before) != digest(after)


def test_values_in_the_programs_objects_are_found_by_their_paths_and_kept_ones_are_left_out() -> None:
    class Sampler:
        weight = 1.0

        def __init__(self) -> None:
            self.epoch, self.rng, self.model = 3, random.Random(1), model

    model = torch.nn.Linear(1, 1)

    found = dict(named("sampler", Sampler(), frozenset({id(model)})))

    assert found.keys() == {"sampler.weight", "sampler.epoch", "generator `sampler.rng`"}
    # A step that sets it makes it the object's own.
    assert (found["sampler.epoch"], found["sampler.weight"]) == ("3", "1.0")
