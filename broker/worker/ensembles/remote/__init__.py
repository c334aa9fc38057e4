"""Steps of ensembles in other workers: requests of this worker's own session with the broker."""
