"""The studies that ship, their arms, and what is published of them; `flowgrpo.recipes.compare` runs them.

Modules:

    studies      The studies that ship
    study_arms   How arms of the studies are trained: programs, and advantages of their own
    study_pages  What `docs/studies` publishes of a study
"""
