"""Design spaces: every choice of model, sizes, stack, device and plan, at scale."""
