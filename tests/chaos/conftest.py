"""The fixtures that ftkit offers to its users, used by its own tests."""

from ftkit.chaos.fixtures import chaos_etcd, chaos_etcd_cluster, chaos_job, chaos_machines, chaos_proxy

__all__ = ["chaos_etcd", "chaos_etcd_cluster", "chaos_job", "chaos_machines", "chaos_proxy"]
