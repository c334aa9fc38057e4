"""Streaming voice activity detection: many streams of speech, one stateful model, state kept by the broker."""
