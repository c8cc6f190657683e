"""Checks of the present device: whether its numbers are right, and how fast it is.

Modules:

    attentions  M2 and F6: packed rows against each sequence alone, for every attention that trains on the device
    bench       Input of all checks: device, host, sizes; and a description of the environment
    figures     Lines of the report, its table and its JSON
    sampling    Logits against the host's; F7 and E3 by prefill, decode steps and scores
    small_runs  A whole run of the quickstart's recipe with fewer updates
    speeds      Rates of products and copies; speed and memory of decode, prefill and update of a published shape
    suite       The checks by name, run one after another; an exception in one doesn't stop the others
    updates     An update against the host's, and against itself
"""
