"""Break a job on purpose, from a seed, and prove from its logs that nothing was lost."""

from ftkit.chaos.faults import Fault, plan

__all__ = ["Fault", "plan"]
