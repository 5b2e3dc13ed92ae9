"""What a user types. A package, so that another `launch` on the path does not take its place."""
