"""What the engine takes, beside what the machine can do."""
