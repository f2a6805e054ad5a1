"""What moeplan's solvers and formats reach and cost, beside named baselines measured in the same run.

Run: `.venv/bin/python -m benchmarks [NAME ...] [--quick] [--full] [--save]`, or `make bench` for all that are not slow.
"""
