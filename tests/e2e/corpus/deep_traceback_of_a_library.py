# The error comes up in the standard library. The place that is named is the user's.
# headline: raised json\.decoder\.JSONDecodeError: Expecting value
# next: none
# not: crashed
# slow

import json


def configuration():
    return json.loads("")


configuration()
