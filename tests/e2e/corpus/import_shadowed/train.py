# headline: raised AttributeError: module 'random' has no attribute 'randint'
# next: /random\.py hides the module random: give that file another name
# not: install random

import random

print(random.randint(1, 6))
