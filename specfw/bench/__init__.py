"""Benchmarks: the prompts, the runs and the reports."""
