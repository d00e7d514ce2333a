"""Epochs, segments and the lengths of conversations on Postgres."""
