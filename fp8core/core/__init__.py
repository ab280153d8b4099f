"""The one call path of every operation."""
