"""One module per experiment: `python -m experiments.NAME --help`."""
