"""Mediation, the group-flight game of DialOp.

Two users with private calendars each talk to one agent in a room of their own; the agent books a
flight for each. The folder holds the rules and texts, the score, instances (generated, stored, or
from recorded human games) and scripted players.
"""
