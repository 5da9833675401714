"""Engine and trainer on the same GPUs: sleep and wake, weight sync, sync check, offload.

Handles a learner, an engine and bytes. Never sees games, rewards or rendered text.
"""
