"""The kernels of the grouped product, most preferred first."""

from typing import Final

from fp8core.kernels.grouped.generic import GENERIC_GROUPED, HOST
from fp8core.kernels.grouped.sm90 import SM90_GROUPED
from fp8core.problem import GroupedMm
from fp8core.table import Table

GROUPED_MM: Final = Table("grouped_scaled_mm_nt", GroupedMm, SM90_GROUPED, GENERIC_GROUPED, HOST)
"""The rows of `grouped_scaled_mm_nt`; a plan is a `fp8core.kernels.grouped.args.GroupedLaunch`."""
