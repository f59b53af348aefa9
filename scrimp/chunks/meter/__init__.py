"""Every byte on the device, measured."""
