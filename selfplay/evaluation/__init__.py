"""Measures a policy: held-out games, cross-play, and the reports on them.

Speaks of games, scores and intervals. Never sees gradients or losses.
"""
