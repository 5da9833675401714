"""Chats as exact tokens: one seat's transcript, chat templates, rendering, tokenizers.

This room turns text into the token ids of the model's own chat template, one new piece at a time,
and records them.
"""
