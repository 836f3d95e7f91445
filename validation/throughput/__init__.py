"""Whole models against throughputs that others published."""
