"""The lab: `opd lab` tests the claims of papers in worlds of tiny models, with rivals and costs in the same table."""
