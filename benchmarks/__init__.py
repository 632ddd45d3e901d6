"""Speed measured against peers in one process, always after a check of the results."""
