"""A worker on a GPU: clients' GPU memory opened there. Nothing here is imported by a worker on the CPU."""
