# headline: raised DistBackendError: NCCL error
# next: torch\.cuda\.set_device
# not: Next step.*NCCL_DEBUG
# slow

class DistBackendError(RuntimeError):
    pass


raise DistBackendError(
    "NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000"
)
