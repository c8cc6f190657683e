"""Rollouts: compiled for pure environments, hosted for the rest."""
