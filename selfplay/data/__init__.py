"""Instances of games: named seeds, generated streams and files, prefetch."""
