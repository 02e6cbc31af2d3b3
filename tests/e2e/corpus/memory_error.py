# headline: raised MemoryError
# next: asked for more memory than this host
# slow

data = bytearray(1 << 62)
