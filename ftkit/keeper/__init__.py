"""The side process of a replica group that alone talks to etcd, and its tools. Imports no torch."""
