"""Recording a model's routing: which modules to watch, what they show, which of it is kept."""
