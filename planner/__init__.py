"""What makes a plan and believes it: strategies, evaluation, certification, the command line."""
