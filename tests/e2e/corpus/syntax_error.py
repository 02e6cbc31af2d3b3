# headline: raised SyntaxError: .*
# next: none
# not: restart 1
# slow

def train(:
    pass
