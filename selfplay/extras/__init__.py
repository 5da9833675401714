"""What only some runs load, by its name, where a setting, a game or a file asks for it."""
