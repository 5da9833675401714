"""Programs that read run folders and games; no training step needs them.

Their additional dependencies are extras in `pyproject.toml`, imported when used.
"""
