"""PyTorch programs to graphs: exported programs, fx graphs, modules with their arguments."""
