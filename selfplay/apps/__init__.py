"""Programs beside the trainer: they read run folders and games, and no step of training needs them.

What one of them needs beyond the trainer is an extra in `pyproject.toml`, imported when it is used.
"""
