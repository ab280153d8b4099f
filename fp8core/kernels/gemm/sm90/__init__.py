"""Products by wgmma and TMA: sm_90."""
