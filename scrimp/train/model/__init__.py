"""Models named by the user: checked without torch, then built."""
