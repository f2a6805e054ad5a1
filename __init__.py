"""moeplan: an offline planner for Mixture-of-Experts expert parallelism."""
