"""What a run tells: metrics and clocks in files, a line in the terminal, curves."""
