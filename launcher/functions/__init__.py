"""A job whose workers run a Python function: `elaunch.launch(config, function)(*args)`, as torch's `elastic_launch`."""
