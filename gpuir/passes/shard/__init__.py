"""Graphs on several ranks: which part of each tensor a rank has, and what they exchange."""
