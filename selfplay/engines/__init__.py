"""Engines: prompt ids (or, for an endpoint, messages) in, sampled completions out.

`base` defines the interface.
"""
