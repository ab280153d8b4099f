"""Fits the estimates behind the choice without tuning to measured times."""
