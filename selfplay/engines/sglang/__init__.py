"""The SGLang engine: runs in child processes of the trainer and takes new weights between steps.

This room handles SGLang's processes, requests, memory and weight buffers. It never sees games,
rewards or gradients. It imports SGLang only when an engine starts. Written for SGLang 0.5.17.
"""
