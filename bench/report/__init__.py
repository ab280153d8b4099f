"""The pages of docs/performance: their tables, goals and sentences, from the records of benchmarks."""
