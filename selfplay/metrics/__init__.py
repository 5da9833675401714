"""The numbers of a step, the run's folder, and what is logged and printed."""
