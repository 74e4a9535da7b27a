"""The command `ftkit`; each subcommand is a module that is imported only when it is asked for."""
