"""NATS servers that Tickwheel starts itself, and the configuration that it proposes for yours."""
