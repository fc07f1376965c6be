"""What the server needs around the core: text and stop strings, parsing of requests, the worker thread."""
