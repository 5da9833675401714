"""Checks that can refuse a run before training starts: settings against the machine (`run`) and
the model against this code (`model`).

Speaks of settings, folders and models. Never sees a played game or a gradient.
"""
