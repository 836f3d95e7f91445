"""What torch.compile does: Inductor."""
