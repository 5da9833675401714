"""Benches of speed, memory and learning, and reports on finished runs. One module per command;
`rows`, `shapes` and `talks` have the shared code. Other scripts that the pages name are
in the history: the scripts of docs/notes/log.md at commit ffa201e.

They call the project's own functions. No part of `dialop` or `selfplay` imports them.
"""
