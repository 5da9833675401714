"""Several policies that learn in one run: their settings, and who has which seat."""
