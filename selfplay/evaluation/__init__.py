"""Measures a policy: held-out games, cross-play, and the reports on them."""
