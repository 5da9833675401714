"""What only some runs load, by its name, where a setting or a file asks for it."""
