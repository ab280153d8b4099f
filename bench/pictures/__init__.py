"""The pictures of results, a module a kind; `bench.plot` draws them."""
