"""Methods beside GRPO, through the hooks that a method of one's own has (`learner/method.py`)."""
