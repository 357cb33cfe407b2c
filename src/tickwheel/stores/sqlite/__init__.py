"""Jobs in a SQLite file."""
