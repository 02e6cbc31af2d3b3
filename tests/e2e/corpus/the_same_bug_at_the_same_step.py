# The step was reported, so there was progress; but each try ends at the same place in the same step.
# max-restarts: 3
# headline: raised ValueError: sample 7 has no label in generation 1
# next: none
# why: same
# not: generation 2
# slow

from elaunch.trainer import link

for step in range(8):
    link.report(step)
    if step == 7:
        raise ValueError("sample 7 has no label")
