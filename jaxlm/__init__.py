"""Pretraining of recurrent-depth and Transformer language models on one GPU."""
