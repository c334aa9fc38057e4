"""Ensembles: state machines in the worker that holds most members. Used by `broker.worker.models` and the loop."""
