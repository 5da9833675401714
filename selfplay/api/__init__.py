"""The Python API, exported by `import selfplay`; `train.py` and `eval.py` are built on it."""
