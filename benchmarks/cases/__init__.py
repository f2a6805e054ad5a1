"""One subject a module; each lists its studies in STUDIES."""
