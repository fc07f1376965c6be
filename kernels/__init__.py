"""Computes models in C, with equal bits by construction: a row's depend on that row alone."""
