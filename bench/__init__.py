"""Benches of speed, memory and learning, and reports on finished runs. One module per command;
`rows` and `shapes` hold what they share.

They call the project's own functions. No part of `dialop` or `selfplay` imports them.
"""
