"""A configuration with the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from scrimp.train.config.sections import Config

DEFAULT, SET = "default", "--set"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """`origins`: by section.key, the name of the file, "--set" or "default". `name`: of the file, for errors."""

    config: Config
    origins: Mapping[str, str]
    name: str

    def differs(self, section: str, key: str) -> bool:
        """Whether somebody gave this key another value than its default. A saved configuration has all keys."""
        mine = getattr(self.config, section)
        default = next(each.default for each in fields(mine) if each.name == key)
        return self.origins[f"{section}.{key}"] != DEFAULT and getattr(mine, key) != default
