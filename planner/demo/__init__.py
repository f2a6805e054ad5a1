"""The embedded model, its text and its recorded trace."""
