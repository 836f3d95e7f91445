"""How ops become launches, whoever decides which: the same for every stack and pass."""
