# headline: raised ImportError: cannot import name 'Data' from partially initialized module 'data'
# next: two files import each other
# not: hides the module

import data
