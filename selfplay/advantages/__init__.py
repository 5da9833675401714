"""From played games to samples with advantages: rewards, returns, group statistics, advantages.

Works on plain floats. Never sees models, gradients, torch or text.
"""
