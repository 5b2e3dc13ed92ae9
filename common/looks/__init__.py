"""Looks at the same tokens again: a teacher, changed images, and further losses that need them."""
