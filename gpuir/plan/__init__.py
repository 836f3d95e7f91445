"""Questions that try many answers: what they find is data."""
