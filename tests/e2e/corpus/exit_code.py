# headline: exited with code 3
# next: none
# slow

raise SystemExit(3)
