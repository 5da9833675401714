"""Decision-oriented dialogue games for two players, as text. Knows no tokens, models or tensors."""
