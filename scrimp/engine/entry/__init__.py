"""What users call besides `step`: evaluate, backward and update, full_parameters, save and load, learning rates."""
