"""The program: settings, and the one place that builds every part and puts them together."""
