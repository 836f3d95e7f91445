"""Model files to graphs: a room for each format."""
