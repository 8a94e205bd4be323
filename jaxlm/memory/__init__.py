"""What GPUs are, and what a program needs on one."""
