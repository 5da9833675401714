"""Collaborative simulation: a user who knows the whole goal, an assistant who must ask for it.

`task` holds the records, `game` the rules, `texts` every sentence a seat reads, `script` scripted
players, `numbers` drawn instances, `store` files, `published` the public data sets' schema,
`grading` the metrics, `sandbox` where code answers meet their tests (`sandbox_child` its processes,
`wall` and `folder` what confines them, `remote` and `plain` what crosses between them). Source
of the setting: Wu et al., "CollabLLM: From Passive Responders to Active Collaborators", ICML 2025,
arXiv 2502.00640.
"""
