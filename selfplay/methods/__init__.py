"""Methods added to GRPO, through the hooks that custom methods also use (`learner/method.py`)."""
