"""Chats as exact tokens: one seat's transcript, chat templates, rendering, tokenizers.

This room turns text into the token ids that the model's own chat template gives, one new piece at a
time, and records them.
"""
