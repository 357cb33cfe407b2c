"""Jobs in Redis or Valkey."""
