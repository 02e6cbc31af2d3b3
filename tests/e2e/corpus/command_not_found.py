# command: sh -c
# script: trian_model
# headline: exited with code 127 \(not found\)
# next: check the spelling of the command
# slow


