"""The collaboration game: a user knows the goal, and an assistant must ask for it and then answer.

The folder has the rules and texts, instances, scripted players and the grading of answers. Source
of the setting: Wu et al., "CollabLLM: From Passive Responders to Active Collaborators", ICML 2025,
arXiv 2502.00640.
"""
