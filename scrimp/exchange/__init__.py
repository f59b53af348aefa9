"""How gradients travel between ranks: all of them, or few entries at a time with the rest kept back."""

from scrimp.exchange._settings import Dense as Dense
from scrimp.exchange._settings import Sparse as Sparse
