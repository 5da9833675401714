"""A person at the table: a seat on a local page or in the terminal, against the policy or another.

Speaks of one game at a time, its seats and what the person may see. Never sees gradients.
"""
