"""The loops of a node: claim jobs, run them, keep leases, fire schedules."""
