"""Leaf package: memory regions, the shared-memory channel, wire messages and errors.

Imported by applications (through `clientlib`), by the broker and by its workers; imports none of them.
"""
