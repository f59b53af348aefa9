"""Checkpoints: written by every rank, committed by a rename, read at any rank count, chunk size and budget."""

from scrimp.checkpoint._load import load
from scrimp.checkpoint._save import save
from scrimp.checkpoint._write import Named

__all__ = ["Named", "load", "save"]
