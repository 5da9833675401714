"""The policy as a model: loading, packed attention, log-probs, adapters, export.

Works with packed tokens and hidden states.
"""
