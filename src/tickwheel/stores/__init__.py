"""The stores, one package or module each. They know the seam and nothing of one another."""
