"""The former name of a command."""

raise SystemExit("python -m dialop.collab.prepare is now python -m selfplay.extras.prepare")
