"""Operators' tools: explain a job, check a store, move jobs, supervise worker processes."""
