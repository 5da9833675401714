"""Checks that can refuse a run before training starts: settings against the machine (`run`), the
model against this code (`model`) and custom functions (`functions`).
"""
