"""Games with opposed interests: how far play is from an equilibrium, and opponents by results."""
