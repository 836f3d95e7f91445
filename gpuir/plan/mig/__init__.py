"""Dividing a GPU: which models on which slices, or together on the whole."""
