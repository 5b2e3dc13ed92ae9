"""Records and metrics of samples and judgements."""
