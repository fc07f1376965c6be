"""A course that grades: eight tasks from one accepted token to a batch (see README.md)."""
