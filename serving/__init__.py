"""What the server needs around the core; it never imports the core."""
