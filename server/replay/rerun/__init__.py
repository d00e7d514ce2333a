"""Stored conversations through a candidate: selection, budget, comparison, assertions, judge, report."""
