"""What the user typed, exported or wrote in a job file: parsed, checked, explained."""
