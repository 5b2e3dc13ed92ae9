"""What all of common/ stands on: files, exits, versions, the toy. It imports nothing above, and no torch."""
