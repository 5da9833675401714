"""The numbers of a step, the run's folder, and what is logged and printed.

Speaks of played games, sums, means and files. Never sees torch, models or gradients.
"""
