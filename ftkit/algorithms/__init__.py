"""Training on top of the manager: averaged gradients, the optimizer's step, exactly-once data."""
