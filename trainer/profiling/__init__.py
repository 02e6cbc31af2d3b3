"""What the ranks compute and send in a few steps of a training: traces, one Perfetto file, a summary in words."""
