"""The comparison of two models on the same tokens."""
