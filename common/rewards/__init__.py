"""What samples earn."""
