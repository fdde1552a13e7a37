"""Personal data and secrets in text: what they are, how they are found, and what happens to a row with
some."""
