"""Systems of the papers beside the trunk, a file each: they import the trunk, and the trunk finds them by name."""
