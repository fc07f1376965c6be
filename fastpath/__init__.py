"""Exact shortcuts for what is slow when done straightforwardly; never imports the core."""
