# headline: was killed by SIGINT in generation
# next: none
# slow

raise KeyboardInterrupt
