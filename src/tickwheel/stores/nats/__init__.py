"""Jobs in NATS JetStream (`store`), and servers of our own to try it with (`servers`)."""
