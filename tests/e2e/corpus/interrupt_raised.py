# headline: (was killed by SIGINT|raised KeyboardInterrupt) in generation
# next: none

raise KeyboardInterrupt
