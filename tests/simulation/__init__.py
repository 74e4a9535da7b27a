"""A deterministic simulation of many members over a fake etcd; see `run.py` for where to begin."""
