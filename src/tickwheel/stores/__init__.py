"""The stores, one module each. They know the seam and the words, and nothing of one another."""
