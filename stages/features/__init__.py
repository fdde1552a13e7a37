"""The target's hidden states that heads train on: their layout, and how they are taken from the target."""
