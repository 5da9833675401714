"""Runs as one page for a browser: what a run folder holds, its curves, tables and games.

Speaks of files of a run folder, charts and HTML. Plays no games. Never sees torch, nor a rule of a
game apart from the pictures in `boards.py`.
"""
