"""Engine and trainer on the same GPUs: sleep and wake, weight sync, sync check, offload.

Works with a learner, an engine and bytes. Never sees games, rewards or rendered text.
"""
