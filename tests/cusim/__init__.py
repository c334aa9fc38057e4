"""A simulated CUDA driver, libcuda.so.1, for tests on machines without a GPU. See cusim.h for what it does.

What it is not: there are no kernels, graphs, memory pools between processes, MIG or faults of peers; times mean
nothing; and its error codes are what CUDA's documentation says, until a real driver's are recorded (tests/conformance).
"""
