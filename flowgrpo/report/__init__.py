"""Reports of a run: metrics and clocks in files, a line in the terminal, curves."""
