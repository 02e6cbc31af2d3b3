# headline: raised (?:AttributeError|_pickle\.PicklingError): Can't
# next: at the top level of a module
# slow

import multiprocessing

multiprocessing.get_context("spawn").Process(target=lambda: None).start()
