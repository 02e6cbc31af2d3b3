"""A program that never imports torch."""

import random

from common import STEPS, step

weight = 0.0
for number in range(1, STEPS + 1):
    weight -= 0.1 * (weight - random.gauss(1, 0.1))
    step(number)
