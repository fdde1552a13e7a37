"""Features -> a draft head that has learnt the target's next tokens."""
