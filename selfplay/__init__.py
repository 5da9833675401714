"""The trainer: two language-model agents learn to talk by playing with themselves."""

__version__ = "0.1.0"
