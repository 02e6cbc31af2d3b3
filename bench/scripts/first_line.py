"""One line, without torch."""

print("first line", flush=True)
