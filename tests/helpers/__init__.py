"""What the tests share: small games, models, runs, engines and processes."""
