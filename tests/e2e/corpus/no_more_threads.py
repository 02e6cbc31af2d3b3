# headline: raised RuntimeError: can't start new thread
# next: raise the limit of processes and threads
# slow

import threading

threading.stack_size(1 << 46)
threading.Thread(target=print).start()
