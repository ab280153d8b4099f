"""The kernels that exist: one table of rows an operation, most preferred first."""
