"""Whether a run fits a GPU, and how it then works."""
