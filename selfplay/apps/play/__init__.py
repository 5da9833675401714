"""A person plays a seat, on a local page or in the terminal, against the policy or another player.

Handles one game at a time, its seats and what the person may see. Never sees gradients.
"""
