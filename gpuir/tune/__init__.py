"""Kernels by themselves: which configurations fit a target, how long each takes, which to try."""
