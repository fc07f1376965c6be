"""HTTP around the core: options, requests, the worker, answers; it never imports the core."""
