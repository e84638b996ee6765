"""Many requests at once: the scheduler, and the server in front of it."""
