"""What a group of operators can choose on a mesh."""
