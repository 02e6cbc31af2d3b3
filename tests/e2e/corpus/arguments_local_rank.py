# headline: exited with code 2 .*the following arguments are required: --local_rank
# next: read os\.environ\['LOCAL_RANK'\]
# slow

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.parse_args()
