"""Benchmarks that users run on their own machine, to compare what ftkit costs with what it saves."""
