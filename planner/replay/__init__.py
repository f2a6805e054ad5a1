"""The MoE layers of a model alone, run on real ranks with recorded routing: seconds measured beside those predicted."""
