# headline: raised RecursionError: maximum recursion depth exceeded
# next: none
# slow

def layer(depth):
    return layer(depth + 1)


layer(0)
