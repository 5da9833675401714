"""Reviewer-paper matching, the "Optimization" game of DialOp.

Two seats see different parts of one value table and agree on an assignment. The folder has the
rules and texts, instances (generated, stored, or from recorded human games) and scripted players.
"""
