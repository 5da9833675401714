"""Mediation, the group-flight game of DialOp.

Two users with private calendars each talk to one agent in a private room; the agent books a flight
for each. The folder has the rules and texts, the score, instances (generated, stored, or from
recorded human games) and scripted players.
"""
