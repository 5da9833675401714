"""The plan of a run, without starting it: settings, first prompt, memory by phase."""
