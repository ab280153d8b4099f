"""The products that a checkpoint needs, to tune and compile them beforehand."""
