"""The report as a page to look at: one file that needs nothing else."""
