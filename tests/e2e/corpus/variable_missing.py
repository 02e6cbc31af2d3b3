# headline: raised KeyError: 'DATA_DIR'
# next: DATA_DIR is not set in the environment

import os

print(os.environ["DATA_DIR"])
