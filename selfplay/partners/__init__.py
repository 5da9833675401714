"""Who plays with the policy: frozen checkpoints, endpoints, scripted players, the policy pool, and
the model that judges games.

Speaks of partners, their engines and their ratings. Never sees gradients or losses.
"""
