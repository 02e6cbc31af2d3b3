# A dictionary of the program's own: not a variable of the environment.
# headline: raised KeyError: 'DATA_DIR'
# next: none
# slow

CONFIG = {}

print(CONFIG["DATA_DIR"])
