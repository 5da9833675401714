"""A finished run as a folder for the Hugging Face hub. Plays no games and loads no weights."""
