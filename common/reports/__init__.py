"""What is written of samples and judgements, for people and for metrics."""
