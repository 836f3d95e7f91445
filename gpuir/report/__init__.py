"""What is known of a run as records: the figures that every form of a report shows."""
