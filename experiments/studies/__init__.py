"""Comparisons over seeds: the studies that ship, how an arm is trained, and what is reported.

Modules:

    compare      Run the arms of a study over seeds
    studies      The studies that ship
    study_arms   One arm of a study
    study_pages  Results of a study: tables, plots, pages
"""
