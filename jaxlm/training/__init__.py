"""Updates, runs, checkpoints."""
