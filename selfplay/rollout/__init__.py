"""Playing games: players, one game turn by turn, branches, all games of a step at once.

Speaks of seats, turns and episodes. Never sees torch, rewards or advantages.
"""
