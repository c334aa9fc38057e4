"""Face detection for several cameras through one broker: `python -m examples.demo`, from the project root."""
