"""Runnable examples. Run from the project root: `python -m examples.demo`."""
