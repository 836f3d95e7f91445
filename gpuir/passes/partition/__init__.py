"""A model in parts that lie one after another, for a pipeline of ranks."""
