"""Engines: they take prompt ids (or, behind an endpoint, messages) and return sampled completions.

This room speaks of requests, completions, sampling and the weights an engine generates with. It
never sees games, rewards or losses. `base` defines the interface.
"""
