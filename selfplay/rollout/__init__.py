"""Playing games: players, one game turn by turn, branches, all games of a step at once.

Works with seats, turns and episodes, which carry the game's own rewards. Never sees torch, samples
or advantages.
"""
