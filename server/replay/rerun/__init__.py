"""Rerun of stored conversations with a candidate: selection, budget, comparison, assertions, judge, report."""
