"""From played games to samples with advantages: rewards, returns, group statistics, advantages.

Works on plain floats.
"""
