"""A job whose workers run a Python function: `elaunch.launch(config, function)(*args)`, as torch's `elastic_launch`."""

# The program of its workers. Its arguments are the function's name and the worker's local rank.
WORKER = "elaunch.launcher.functions.worker"
