"""Launches as a compiler that writes loops makes them: PyTorch's Inductor."""
