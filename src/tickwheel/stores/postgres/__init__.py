"""Jobs in PostgreSQL."""
