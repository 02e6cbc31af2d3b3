# headline: raised RuntimeError: CUDA error: device-side assert triggered
# next: an index is out of range in a GPU kernel
# not: illegal|compute-sanitizer
# slow

raise RuntimeError(
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API"
    " call, so the stacktrace below might be incorrect."
)
