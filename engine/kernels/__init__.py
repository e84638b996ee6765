"""Every compiled function of the engine, and nothing else."""
