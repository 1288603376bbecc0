"""The lab: `opd lab` reproduces the claims of the papers in the tiny world, rivals and costs in the same table."""
