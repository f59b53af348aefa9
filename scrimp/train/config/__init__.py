"""The configuration of a run: sections as frozen dataclasses, their keys with types and ranges, reading and writing of TOML."""
