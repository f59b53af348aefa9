"""Tables, curves and pictures on a terminal."""
