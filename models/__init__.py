"""From a name or a file to a model that can be served."""
