"""Other tools' work -> artifacts: hidden states and draft heads of speculators, SpecForge and EAGLE."""
