"""The Python API, which `import selfplay` offers; `train.py` and `eval.py` are layers over it."""
