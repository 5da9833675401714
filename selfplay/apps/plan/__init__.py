"""What a run would do and need, without starting it: settings, first prompt, memory by phase."""
