"""Products of cuBLASLt and hipBLASLt: two rows of names and numbers (`dialects`), and one plan over them (`matmul`)."""
