"""Modules that only some runs load, by name, if a setting, a game or a file asks for them."""
