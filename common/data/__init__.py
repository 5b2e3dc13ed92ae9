"""From files to batches of prompts, and from tokens back to text."""
