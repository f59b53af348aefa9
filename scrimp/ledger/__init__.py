"""Bytes by kind and tier: what is held now, what was held at the peak, and when that was."""

from scrimp.ledger._ledger import KINDS, Books, Ledger, Snapshot
from scrimp.ledger._sizes import format_least, format_nbytes, parse_nbytes

__all__ = ["KINDS", "Books", "Ledger", "Snapshot", "format_least", "format_nbytes", "parse_nbytes"]
