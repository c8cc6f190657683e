"""Judges of outcomes: functions that return a `Reward`."""
