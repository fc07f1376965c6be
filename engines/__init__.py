"""Engines of others behind this server's interface, where they run already.

    --engine http://host:8000   relay.py sends requests there, client.py speaks HTTP with it

app.py puts them behind the routes, and plan.py says how to start one. docs/engines.md says what
such an engine can and cannot do.
"""
