"""One parameter's update, and the update streamed through the device."""
