"""The version of scrimp, for packages that may not import the root."""

__version__ = "0.1.0.dev0"
