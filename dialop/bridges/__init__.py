"""Adapters to other libraries' games (docs/bridges.md).

Each module imports one library, an optional dependency, and is loaded only by name.
"""
