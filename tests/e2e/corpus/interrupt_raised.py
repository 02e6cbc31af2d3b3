# headline: was killed by SIGINT in generation
# next: none

raise KeyboardInterrupt
