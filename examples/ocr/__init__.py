"""Reading a printed page: a package reads it with its models in a broker instead of sessions of its own."""
