"""The policy as a model: loading, packed attention, log-probs, adapters, export.

Works with packed tokens and hidden states. Never sees games, batches or losses.
"""
