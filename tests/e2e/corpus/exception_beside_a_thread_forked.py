# options: --preload json
# A thread that lives keeps Python from ending. The agent hears that the program is over.
# headline: raised ValueError: shard 3 is torn in generation 0
# next: none
# not: was killed by SIGKILL in
# slow

import threading
import time

threading.Thread(target=time.sleep, args=(1000,)).start()
raise ValueError("shard 3 is torn")
