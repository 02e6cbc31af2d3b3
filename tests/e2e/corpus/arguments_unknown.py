# script: --lr0 0.1
# headline: exited with code 2 \(the exit code of a wrong command line; unrecognized arguments: --lr0 0\.1\)
# next: correct the arguments after the script; train\.py --help lists them
# not: LOCAL_RANK

import argparse

argparse.ArgumentParser().parse_args()
