"""What computes: values, how tokens are chosen, KV caches, models, grammars and kernels."""
