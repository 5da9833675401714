"""A trained policy behind a chat server on this machine. Plays no games and sees no gradients."""
