"""Triton kernels of the drafter, for CUDA devices; every one has its torch twin where it is called."""
