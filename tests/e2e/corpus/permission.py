# headline: raised PermissionError: .*'/etc/shadow'
# next: this user may not open /etc/shadow
# slow

import os

if os.getuid() == 0:
    os.setuid(65534)
open("/etc/shadow")
