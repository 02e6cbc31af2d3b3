"""torchrun's behaviours that a program or a script may rely on, as tests of the command, for torchrun and for elaunch.

`behaviours/` is the list. `make conformance` runs all of it against both launchers. The fast suite runs against elaunch
only what no other test proves.
"""
