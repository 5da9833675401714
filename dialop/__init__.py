"""Dialogue games for two players who must decide something together, as text.

Each game has its own folder. This folder holds what the games share: the interface, move tags, data
files, specs of scripted players and the command line. Nothing here sees tokens, models, tensors or
`selfplay`.
"""

__version__ = "0.1.0"
