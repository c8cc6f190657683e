"""Generators: requests flow in, completions flow out; one life cycle of `generate`, `submit` and `close`."""
