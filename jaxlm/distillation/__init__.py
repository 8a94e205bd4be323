"""Caching what a teacher predicts: a run of jaxlm, or a causal language model of Hugging Face."""
