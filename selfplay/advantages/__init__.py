"""From played games to samples with advantages: rewards, returns, group statistics, advantages.

Computes with plain floats.
"""
