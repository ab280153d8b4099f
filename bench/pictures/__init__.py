"""The plots of results, with a module for each kind; `bench.plot` draws them."""
