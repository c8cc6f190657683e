"""Agents that know nothing of training, each in the library that its name says.

Modules:

    sdk      An agent written with the SDK of OpenAI: three tools, and words to call them
    waiting  An agent that does nothing but ask and wait, to measure with
"""
