"""Checks that can refuse a run before training starts: settings against the machine (`run`) and
the model against this code (`model`).
"""
