"""Where a step's instances come from: named seeds, instance streams, prefetching workers.

Curriculum and prioritized replay select the instances of a training step. This room handles
instances as opaque values with a key; it never sees rules, tokens or torch.
"""
