"""The policy's partners: frozen checkpoints, endpoints, scripted players, the policy pool; and the
model that judges games.
"""
