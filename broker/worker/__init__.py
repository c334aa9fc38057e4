"""A worker process: schedules and runs models directly on clients' memory. Expendable; started by the broker."""
