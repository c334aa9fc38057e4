"""Stand-ins for libraries that cannot run in tests. Each is held against the real library's signatures by a test."""
