"""Soak, faults and fuzzing: ordinary use, for long, with everything around the calls moving."""
