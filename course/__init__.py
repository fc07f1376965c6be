"""A course that grades: nine tasks from one accepted token to a drafter (see README.md)."""
