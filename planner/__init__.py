"""Planning: strategies, evaluation, certification and the command line."""
