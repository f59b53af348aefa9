"""What a save costs training, in the background and not."""
