"""Show a job survive: faults on purpose, what followed measured, and a check of the result."""
