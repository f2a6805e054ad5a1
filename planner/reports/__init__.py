"""What the console is told of plans, profiles and traces."""
