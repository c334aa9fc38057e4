"""GPU memory between processes, over NVIDIA's driver library alone: never the CUDA runtime, torch or a kernel.

    descriptor   what a region of GPU memory is, in messages; no CUDA
    driver       the only importer of `cuda.bindings`, on first use: probe, devices, contexts, errors by name
    handles      export and import: 64-byte handles of ordinary allocations, descriptors of VMM memory
    sync         streams, and rings of events by which one process's stream waits for another's

Used by `clientlib` and by the workers. Importing any of it imports no CUDA; the broker knows `descriptor` only.
"""
