"""The stores, one package or module each. They know the seam and the words, and nothing of one another."""
