"""Engines: they take prompt ids (or, behind an endpoint, messages) and return sampled completions.

`base` defines the interface.
"""
