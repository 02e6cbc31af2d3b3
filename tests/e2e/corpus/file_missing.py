# headline: raised FileNotFoundError: .*'data/train\.bin'
# next: the path is relative to the folder where elaunch was started

open("data/train.bin")
