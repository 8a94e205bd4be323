"""Two or more models on exactly the same tokens, in cycles: data, training, evaluation, verdict."""
