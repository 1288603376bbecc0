"""All keys of a recipe."""
