"""The proof of a rule by numbers."""
