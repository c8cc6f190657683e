"""Checks of the device that is there: are its numbers right, and how fast are they.

Modules:

    attentions  M2 and F6: packed rows against each sequence alone, for every attention that trains there
    bench       What all checks are given: device, host, sizes; and the environment in words
    figures     Lines of the verdict, its table and its JSON
    sampling    Logits against the host's; F7 and E3 by prefill, decode steps and scores
    small_runs  A whole run of the quickstart's recipe with fewer updates
    speeds      Rates of products and copies; decode, prefill and update of a published shape, and their memory
    suite       The checks by name, run one after another, whatever one of them raises
    updates     An update against the host's, and against itself
"""
