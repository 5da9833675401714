"""Benches of speed, memory and learning, and reports on finished runs. One module per command;
`memory`, `rows`, `shapes` and `talks` hold what they share. Other scripts that docs/log.md names
are in the history at commit ffa201e.

They call the project's own functions. No part of `dialop` or `selfplay` imports them.
"""
