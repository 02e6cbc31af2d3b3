# headline: exited with code 1
# next: none
# not: lost a peer

import sys

sys.exit("the data set is empty")
