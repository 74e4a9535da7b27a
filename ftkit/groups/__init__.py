"""Process groups that can be torn down at any moment and formed anew with other members."""
