"""The system on several processes and hosts: a master, workers that roll out, judge and train, over Ray.

`orders` says what flows between them, `workers` what each does, `master` who does what when, `crew` how they are
started, called and replaced: the one module that imports Ray.
"""
