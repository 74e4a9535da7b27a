"""Run replica groups as local processes: start, restart, drain, end; none is left behind."""
