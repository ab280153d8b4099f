"""The kernels: one table of rows per operation, most preferred first."""
