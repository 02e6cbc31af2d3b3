# headline: raised FileNotFoundError: .*'data/train\.bin'
# next: the path is relative to the folder where elaunch was started
# slow

open("data/train.bin")
