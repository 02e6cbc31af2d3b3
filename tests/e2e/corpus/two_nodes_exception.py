# slow
# nodes: 2
# headline: rank 1 .* raised ModuleNotFoundError: No module named 'yaml_of_node_1'
# next: install the package that has yaml_of_node_1 on every node
# not: rank 0 \(.* (?:raised|was killed|lost)

import os
import signal

if os.environ["RANK"] == "1":
    import yaml_of_node_1
signal.pause()
