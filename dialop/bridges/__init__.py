"""Adapters between this package's games and other libraries' environments (docs/bridges.md).

Each module imports one library, an optional dependency, and is loaded only by name.
"""
