"""Imitation of scripted players, people and chats before self-play."""
