"""Who plays with the policy: frozen checkpoints, endpoints, scripted players, the policy pool, and
the model that judges games.
"""
