"""The update: micro-batches, losses, PPO's critic, the reference, the optimizer.

Takes samples with advantages.
"""
