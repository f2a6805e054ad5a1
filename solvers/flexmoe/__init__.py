"""FlexMoE: replicas that follow the load while a model trains."""
